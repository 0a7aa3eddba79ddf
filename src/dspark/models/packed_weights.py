"""Weights as an accelerator's products read them: coded ones repacked, bf16 ones as they are stored."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.checkpoint.folder import TensorSource
from dspark.checkpoint.load import stored_values
from dspark.checkpoint.plan import TensorPlan
from dspark.layers.attention import Attention
from dspark.layers.linear import GroupedLinear, Linear
from dspark.layers.moe import RoutedExperts, Router
from dspark.models.names import Place, place_of
from dspark.ops.packing import GROUP_ROWS, PackedWeight, pack_fp4, pack_fp8, stack_experts

Device = torch.device | str


def packable(plans: Sequence[TensorPlan], model: nn.Module) -> dict[str, list[TensorPlan]]:
    """The stored tensors of each weight that only products read, by the weight's path."""
    groups: dict[str, list[TensorPlan]] = {}
    for plan in plans:
        path = place_of(plan.name).path
        owner, _, leaf = path.rpartition(".")
        module = model.get_submodule(owner)
        is_weight = isinstance(module, RoutedExperts) or (isinstance(module, Linear | Router) and leaf == "weight")
        if is_weight and (plan.scale is not None or plan.dtype == "BF16"):
            groups.setdefault(path, []).append(plan)
    return groups


def fill_packed(model: nn.Module, path: str, source: TensorSource, plans: Sequence[TensorPlan], device: Device) -> None:
    """Put a weight on the device in place of its parameter.

    Args:
        plans: its stored tensors: one, or the halves and experts that it is made of.
    """
    owner, _, leaf = path.rpartition(".")
    module = model.get_submodule(owner)
    parts: dict[int | None, list[tuple[Place, TensorPlan]]] = {}
    for plan in plans:
        place = place_of(plan.name)
        parts.setdefault(place.expert, []).append((place, plan))
    reads_whole = not isinstance(module, GroupedLinear) or plans[0].shape[0] // module.groups % GROUP_ROWS == 0
    ordered = [sorted(parts[expert], key=lambda part: part[0].half or 0) for expert in sorted(parts, key=_number)]
    pack = _pack if reads_whole else _values
    packed = [pack([plan for _, plan in halves], source, device) for halves in ordered]
    is_stack = isinstance(module, RoutedExperts)
    del module._parameters[leaf]
    setattr(module, leaf, _joined(packed, is_stack))


def join_maps(model: nn.Module) -> None:
    """Let maps that read the same rows share a weight; once all weights are in their places."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.join_maps()


def _number(expert: int | None) -> int:
    return -1 if expert is None else expert


def _pack(halves: Sequence[TensorPlan], source: TensorSource, device: Device) -> PackedWeight | Tensor:
    """One weight whose rows are those of its halves, one after the other."""
    first = halves[0]
    codes = torch.cat([source.read(plan.name).to(device) for plan in halves])
    if first.scale is None:
        return codes
    scale = torch.cat([source.read(plan.scale or "").to(device) for plan in halves])
    if first.encoding == "fp4":
        return pack_fp4(codes, scale)
    assert first.block is not None
    return pack_fp8(codes, scale, first.block)


def _values(halves: Sequence[TensorPlan], source: TensorSource, device: Device) -> Tensor:
    """The same as bf16 values, for groups of rows that are no whole tiles of packed ones; every code has one."""
    return torch.cat([stored_values(source, plan).to(device, torch.bfloat16) for plan in halves])


def _joined(weights: Sequence[PackedWeight | Tensor], is_stack: bool) -> object:
    """A single weight, or the stack of all experts."""
    first = weights[0]
    if isinstance(first, PackedWeight):
        return stack_experts([weight for weight in weights if isinstance(weight, PackedWeight)])
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    values = torch.stack(tensors) if is_stack else tensors[0]
    return nn.Parameter(values.to(torch.bfloat16), requires_grad=False)
