"""Weights that stay as they are stored hold the values of the checkpoint, whatever halves and experts they have."""

import importlib

import pytest
import torch

from dspark.engine import embedded_folder
from dspark.models.build import load_model
from dspark.ops.packing import PackedWeight, unpack
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
