"""Scores, choice and weights of experts: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.route import Route
from dspark.ops.triton.launch import block_of, packed

# Below this, 1 + e has lost too many bits of e for a logarithm, and five terms of the series are exact enough.
_SMALL = tl.constexpr(0.03)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) of a float32 block."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    return tl.maximum(x, 0.0) + tl.where(e < _SMALL, series, tl.log(1.0 + e))


@triton.jit
def _route(
    logits,
    bias,
    given,
    chosen,
    weights,
    sum_eps,
    scaling,
    E: tl.constexpr,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOOSES: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes, slots = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = lanes < E
    scores = tl.sqrt(_softplus(tl.load(logits + row * E + lanes, mask=inside, other=0.0)))
    if CHOOSES:
        biased = tl.where(inside, scores + tl.load(bias + lanes, mask=inside, other=0.0), float("-inf"))
    found = tl.zeros([SLOTS], dtype=tl.float32)
    total = 0.0
    for slot in tl.static_range(COUNT):
        if CHOOSES:
            best = tl.max(biased, 0)
            # The lower of two equal experts; a row of numbers that are none still names experts that exist.
            expert = tl.minimum(tl.min(tl.where(biased == best, lanes, BLOCK), 0), E - 1).to(tl.int64)
            biased = tl.where(lanes == expert, float("-inf"), biased)
        else:
            expert = tl.load(given + row * COUNT + slot)
        tl.store(chosen + row * COUNT + slot, expert)
        score = tl.sum(tl.where(lanes == expert, scores, 0.0), 0)
        total += score
        found = tl.where(slots == slot, score, found)
    if NORMALISE:
        found = found / (total + sum_eps)
    tl.store(weights + row * COUNT + slots, found * scaling, mask=slots < COUNT)


def route_rows(
    logits: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor | None,
    count: int,
    normalise: bool,
    sum_eps: float,
    scaling: float,
) -> Route:
    """See `dspark.ops.route.route_rows`."""
    num_rows, experts = logits.shape
    chosen = torch.empty(num_rows, count, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, count, dtype=torch.float32, device=logits.device)
    if num_rows:
        _route[(num_rows,)](
            packed(logits),
            None if bias is None else packed(bias),
            None if expert_ids is None else packed(expert_ids),
            chosen,
            weights,
            sum_eps,
            scaling,
            experts,
            count,
            block_of(count),
            block_of(experts),
            expert_ids is None,
            normalise,
            num_warps=1,
        )
    return Route(chosen, weights)
