"""Gated feed-forward experts: one shared by all rows, and the routed ones that each row chose."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.elementwise import silu
from dspark.ops.linear import computed_rows, linear
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

    Pairs (row, slot) are grouped by expert so that each touched expert's weights are read once; experts whose weights
    are elsewhere add zero.

    Args:
        x: [T, D], already quantised. route: k experts a row.
        w13: [E, 2F, D] gate and up stacked. w2: [E, D, F]; of the experts that the route holds.
        limit: clamp of gate and up. quantise: activation quantisation in front of w2.
    Returns:
        [T, D] float32.
    """
    num_rows, count = route.expert_ids.shape
    held = range(w13.shape[0]) if route.held is None else route.held
    pairs, places, groups = _pairs_by_expert(route.expert_ids, held, w13[0])
    if not groups:
        return x.new_zeros(x.shape, dtype=torch.float32)
    rows = x[pairs // count]
    projected = torch.cat([linear(rows[start:stop], w13[expert]) for expert, start, stop in groups])
    inner = gate_and_up(projected, limit) * route.weights.flatten()[pairs].unsqueeze(-1)
    inner = quantise(inner.to(x.dtype))
    outputs = [linear(inner[start:stop], w2[expert]) for expert, start, stop in groups]
    placed = torch.cat([*outputs, x.new_zeros(1, x.shape[1])])[places].float().view(num_rows, count, -1)
    total = placed[:, 0]
    for slot in range(1, count):
        total = total + placed[:, slot]
    return total


Weights = tuple[Tensor, Tensor]
# The place of a pair whose expert's weights another rank holds: the last one, where a row of zeros lies.
_ELSEWHERE = -1


class Terms(NamedTuple):
    """Rows [T, D] whose last sum is left to their reader, as some kernels give them.

    Attributes:
        slots: [T, k, D], added in float32 from first to last; None where there are none.
        sections: [n, T, D], whose sum from first to last is rounded to `dtype` and added last.
    """

    slots: Tensor | None
    sections: Tensor
    dtype: torch.dtype


# What a half's last op gives.
Output = Tensor | Terms


def sum_terms(output: Output) -> Tensor:
    """[T, D] of what a half's last op gave; these twins leave no sum to the reader."""
    assert isinstance(output, Tensor)
    return output


def shared_expert_of(
    product: Callable[[Tensor, Tensor], Tensor], gate: Callable[[Tensor, float], Tensor]
) -> Callable[..., Tensor]:
    """The shared expert from its parts: `linear` and `gate_and_up` of one set of twins."""

    def shared_expert(
        x: Tensor, weights: Weights, limit: float, quantise: Callable[[Tensor], Tensor], group: int
    ) -> Tensor:
        """The expert that every row passes through: [T, D] -> [T, D].

        Args:
            x: already quantised. weights: w13 and w2. limit: clamp of gate and up.
            quantise: activation quantisation in front of w2, of `group` columns that share a scale; 0: the identity.
        """
        return product(quantise(gate(product(x, weights[0]), limit).to(x.dtype)), weights[1])

    return shared_expert


def mixture_of(routed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Routed and shared experts together, from the `routed_experts` of one set of twins."""

    def mixture(
        x: Tensor,
        route: Route,
        experts: Weights,
        shared: Tensor,
        limit: float,
        quantise: Callable[[Tensor], Tensor],
        group: int,
    ) -> Tensor:
        """Routed sum in float32, shared expert added last.

        Args:
            x: [T, D], already quantised. experts: w13 and w2 of the routed experts. shared: what `shared_expert` gave.
            limit, quantise, group: see `shared_expert_of`.
        Returns:
            [T, D] in the dtype of `x`.
        """
        return (routed(x, route, *experts, limit, quantise) + shared).to(x.dtype)

    return mixture


mixture = mixture_of(routed_experts)
shared_expert = shared_expert_of(linear, gate_and_up)


def _pairs_by_expert(
    expert_ids: Tensor, held: range, weight: Tensor
) -> tuple[Tensor, Tensor, list[tuple[int, int, int]]]:
    """Group the pairs (row, slot) by held expert, each group filled up to the rows that its product computes anyway.

    Example: 3 pairs of expert 5 in tiles of 4 take the places 0..3; place 3 repeats the first of them and is not read.

    Returns:
        flat pair number [P] of each place, the place [T*k] of each pair or the last one, and (number in the stack,
        start, stop) of each group.
    """
    chosen = expert_ids.flatten().tolist()
    members: dict[int, list[int]] = {}
    for pair, expert in enumerate(chosen):
        if expert in held:
            members.setdefault(expert - held.start, []).append(pair)
    order: list[int] = []
    places = [_ELSEWHERE] * len(chosen)
    groups = []
    for expert in sorted(members):
        own = members[expert]
        start = len(order)
        for place, pair in enumerate(own, start):
            places[pair] = place
        order += own + own[:1] * (computed_rows(len(own), weight) - len(own))
        groups.append((expert, start, len(order)))
    device = expert_ids.device
    return torch.tensor(order, device=device), torch.tensor(places, device=device), groups
