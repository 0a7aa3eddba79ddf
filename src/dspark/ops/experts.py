"""Gated feed-forward experts: one shared by all rows, and the routed ones that each row chose."""

from collections.abc import Callable

import torch
from torch import Tensor

from dspark.ops.elementwise import silu
from dspark.ops.linear import linear
from dspark.ops.route import Route


def gate_and_up(projected: Tensor, limit: float) -> Tensor:
    """silu(gate) * up from [.., 2F]; gate clamped from above and up on both sides by `limit`, in float32."""
    gate, up = projected.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


def routed_experts(
    x: Tensor, route: Route, w13: Tensor, w2: Tensor, limit: float, quantise: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sum of the chosen experts' outputs, added in slot order, in float32.

    Pairs (row, slot) are grouped by expert so that each touched expert's weights are read once.

    Args:
        x: [T, D], already quantised. route: k experts a row.
        w13: [E, 2F, D] gate and up stacked. w2: [E, D, F].
        limit: clamp of gate and up. quantise: activation quantisation in front of w2.
    Returns:
        [T, D] float32.
    """
    num_rows, count = route.expert_ids.shape
    pairs, groups = _pairs_by_expert(route.expert_ids)
    rows = x[pairs // count]
    projected = torch.cat([linear(rows[start:stop], w13[expert]) for expert, start, stop in groups])
    inner = gate_and_up(projected, limit) * route.weights.flatten()[pairs].unsqueeze(-1)
    inner = quantise(inner.to(x.dtype))
    outputs = torch.cat([linear(inner[start:stop], w2[expert]) for expert, start, stop in groups])
    placed = torch.empty(num_rows * count, outputs.shape[1], device=x.device).index_copy_(0, pairs, outputs.float())
    placed = placed.view(num_rows, count, -1)
    total = placed[:, 0]
    for slot in range(1, count):
        total = total + placed[:, slot]
    return total


def _pairs_by_expert(expert_ids: Tensor) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Flat pair numbers [T*k] sorted by expert, and for each touched expert its (expert, start, stop)."""
    chosen = expert_ids.flatten().tolist()
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    groups: list[tuple[int, int, int]] = []
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or chosen[order[stop]] != chosen[order[start]]:
            groups.append((chosen[order[start]], start, stop))
            start = stop
    return torch.tensor(order, device=expert_ids.device), groups
