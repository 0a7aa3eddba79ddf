"""Weights that stay as they are stored hold the values of the checkpoint, whatever halves and experts they have."""

import importlib

import pytest
import torch

from dspark.checkpoint.formats import quantise_fp8
from dspark.engine import embedded_folder
from dspark.models.build import load_model
from dspark.ops.packing import PackedWeight, join_weights, pack_fp8, unpack
from dspark.ops.table import StoredTable, table_rows

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def models():
    """The embedded model as the CPU holds it, and as an accelerator's products read it."""
    ops = importlib.import_module("dspark.ops.opset_triton").TRITON_OPS
    return load_model(embedded_folder()), load_model(embedded_folder(), ops)


def weights_of(model):
    for name, module in model.named_modules():
        for leaf in ("weight", "w13", "w2"):
            weight = getattr(module, leaf, None)
            if isinstance(weight, PackedWeight | StoredTable | torch.Tensor):
                yield f"{name}.{leaf}", weight


def test_every_weight_has_its_values(models):
    plain, held = (dict(weights_of(model)) for model in models)
    assert plain.keys() == held.keys()
    for name, weight in held.items():
        assert torch.equal(values_of(weight).view_as(plain[name]), plain[name]), name


def values_of(weight):
    if isinstance(weight, PackedWeight):
        return unpack(weight)
    if isinstance(weight, StoredTable):
        return table_rows(weight, torch.arange(weight.shape[0]))
    return weight.float()


def test_products_read_codes(models):
    """Experts are fp4, dense maps fp8; groups of rows that are no whole tiles are bf16, as what is stored so."""
    held = dict(weights_of(models[1]))
    assert held["target.layers.0.ffn.experts.w13"].kind == "fp4"
    assert held["target.layers.0.attn.wq_b.weight"].kind == "fp8"
    for name in ("target.layers.0.attn.wo_a.weight", "target.head.weight", "target.layers.0.ffn.gate.weight"):
        assert held[name].dtype == torch.bfloat16


def test_maps_of_one_input_share_a_weight(models):
    """What reads the same rows is one weight, which holds the values of each map and no memory of its own."""
    groups = [
        group
        for block in models[1].target.layers
        for group in (block.attn.latent_maps, getattr(block.attn, "compression_maps", None))
        if group is not None and group.joined is not None
    ]
    assert groups
    for group in groups:
        whole = group.joined.codes if isinstance(group.joined, PackedWeight) else group.joined
        for one in group.maps:
            part = one.weight.codes if isinstance(one.weight, PackedWeight) else one.weight
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("rows", [(128, 64), (256, 128), (128, 128, 40), (100, 64)])
def test_joined_weights_are_those_of_their_parts(rows):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(count, 256, generator=generator) for count in rows]
    whole, shares = join_weights([part.bfloat16() for part in parts])
    assert torch.equal(whole, torch.cat(parts).bfloat16())
    assert all(torch.equal(share, part.bfloat16()) for share, part in zip(shares, parts, strict=True))
    packed = [pack_fp8(*quantise_fp8(part, (128, 128)), (128, 128)) for part in parts]
    joined = join_weights(packed)
    if any(count % 128 for count in rows[:-1]):
        assert joined is None
        return
    assert torch.equal(unpack(joined[0])[0], torch.cat([unpack(part)[0] for part in packed]))
    for share, part in zip(joined[1], packed, strict=True):
        assert torch.equal(unpack(share), unpack(part))


def test_weights_of_different_kinds_are_not_joined():
    plain = torch.zeros(128, 128)
    coded = pack_fp8(*quantise_fp8(plain, (128, 128)), (128, 128))
    assert join_weights([plain.bfloat16(), coded]) is None
    assert join_weights([plain, plain]) is None
    assert join_weights([coded]) is None
