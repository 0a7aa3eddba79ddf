"""A model of real shapes with random weights, made on the device in the form in which its products read them.

What a checkpoint's loading would leave behind, without a checkpoint: coded weights are packed, bf16 ones stay bf16, all
others are float32. No weight exists in any other form on the way, so a model may fill the device.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from dspark.bench.kernel_shapes import Form
from dspark.bench.random_weights import random_weight
from dspark.checkpoint.plan import TensorPlan
from dspark.layers.engram import EngramTable
from dspark.layers.linear import Embedding, GroupedLinear
from dspark.layers.moe import HashRouter, RoutedExperts
from dspark.layers.plans import ModelPlan
from dspark.models.build import Model
from dspark.models.model_bytes import model_without_memory, packed_parts
from dspark.ops.opset import OpSet
from dspark.ops.packing import GROUP_ROWS, Kind, PackedWeight

# Codes of e4m3 are large: with scales lowered by 2^4 a map of a few thousand columns keeps the size of its input, so
# that a row's route depends on its own token more than on what all rows of a request have in common.
_LOWER_SCALES = 0x04040404
_FP8_FORMS = {(32, 32): Form.FP8_32, (128, 128): Form.FP8_128}


def dummy_model(plan: ModelPlan, ops: OpSet, dtype: torch.dtype, device: torch.device) -> Model:
    """A model whose weights are random, the same on every call.

    Args:
        plan: of the geometry. ops, dtype, device: as for `load_model`.
    """
    model = model_without_memory(plan, ops, dtype)
    generator = torch.Generator(device=device).manual_seed(0)
    packed = packed_parts(model)
    for number, (path, parts) in enumerate(packed.items()):
        _set_packed(model, path, parts, device, number)
    _fill_values(model, device, generator)
    for module in model.modules():
        if isinstance(module, HashRouter):
            _fill_routes(module, generator, device)
    if plan.ngrams is not None:
        model.target.token_map = torch.arange(plan.vocab_size) % plan.ngrams.compressed_vocab_size
    return model.to(device).eval()


def without_draft(model: Model) -> Model:
    """A model for plain decoding that shares all weights of another; it captures nothing for a draft."""
    plain = model_without_memory(replace(model.plan, draft=None), model.target.ops, model.target.dtype)
    for name, child in model.target.named_children():
        setattr(plain.target, name, child)
    plain.target.token_map = model.target.token_map
    return plain.eval()


def _set_packed(model: Model, path: str, parts: list[TensorPlan], device: torch.device, seed: int) -> None:
    """Put a random weight in place of a parameter, as `fill_packed` puts a stored one."""
    owner, _, leaf = path.rpartition(".")
    module = model.get_submodule(owner)
    *stack, N, K = getattr(module, leaf).shape
    is_whole = not isinstance(module, GroupedLinear) or N // module.groups % GROUP_ROWS == 0
    form = _form_of(parts[0]) if is_whole else Form.BF16
    weight = random_weight(form, stack[0] if stack else 1, N, K, device, seed)
    del module._parameters[leaf]
    if isinstance(weight, PackedWeight) and weight.kind is Kind.FP8:
        weight.scales.sub_(_LOWER_SCALES)
    if isinstance(weight, Tensor):
        weight = nn.Parameter(weight if isinstance(module, RoutedExperts) else weight[0], requires_grad=False)
    setattr(module, leaf, weight)


def _form_of(one: TensorPlan) -> Form:
    if one.encoding == "fp4":
        return Form.FP4
    return _FP8_FORMS.get(one.block, Form.BF16) if one.block else Form.BF16


def _fill_values(model: Model, device: torch.device, generator: torch.Generator) -> None:
    """Values of all parameters that have no memory yet: small ones for maps, ones for norms."""
    for owner, name, empty in _empty_parameters(model):
        values = torch.empty(empty.shape, device=device)
        if empty.dim() >= 2:
            # Rows of tables are vectors of unit variance; maps keep the size of what they are given.
            values.normal_(
                0, 1.0 if isinstance(owner, Embedding | EngramTable) else empty.shape[-1] ** -0.5, generator=generator
            )
        elif name in ("weight", "scale"):
            values.fill_(1.0)
        else:
            values.zero_()
        setattr(owner, name, nn.Parameter(values, requires_grad=False))


def _empty_parameters(model: Model) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in list(model.modules()):
        for name, value in list(module.named_parameters(recurse=False)):
            if value.is_meta:
                yield module, name, value


def _fill_routes(router: HashRouter, generator: torch.Generator, device: torch.device) -> None:
    """Different random experts for every token."""
    rows, topk = router.tid2eid.shape
    scores = torch.rand(rows, router.plan.num_experts, generator=generator, device=device)
    router.tid2eid = scores.topk(topk, dim=-1).indices
