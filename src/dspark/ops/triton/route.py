"""Choice and weight of experts: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.route import Route
from dspark.ops.triton.launch import block_of, packed


@triton.jit
def _choose(scores, bias, out, E: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < E
    biased = tl.load(scores + row * E + lanes, mask=inside, other=0.0) + tl.load(bias + lanes, mask=inside, other=0.0)
    biased = tl.where(inside, biased, float("-inf"))
    for slot in tl.static_range(COUNT):
        best = tl.max(biased, 0)
        # The lower of two equal experts; a row of numbers that are none still names experts that exist.
        expert = tl.minimum(tl.min(tl.where(biased == best, lanes, BLOCK), 0), E - 1)
        tl.store(out + row * COUNT + slot, expert.to(tl.int64))
        biased = tl.where(lanes == expert, float("-inf"), biased)


@triton.jit
def _weigh(scores, experts, out, sum_eps, scaling, E: tl.constexpr, COUNT: tl.constexpr, NORMALISE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for slot in tl.static_range(COUNT):
        total += tl.load(scores + row * E + tl.load(experts + row * COUNT + slot))
    for slot in tl.static_range(COUNT):
        weight = tl.load(scores + row * E + tl.load(experts + row * COUNT + slot))
        if NORMALISE:
            weight = weight / (total + sum_eps)
        tl.store(out + row * COUNT + slot, weight * scaling)


def choose_experts(scores: Tensor, bias: Tensor, count: int) -> Tensor:
    """See `dspark.ops.route.choose_experts`."""
    num_rows, experts = scores.shape
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    if num_rows:
        _choose[(num_rows,)](packed(scores), packed(bias), out, experts, count, block_of(experts), num_warps=1)
    return out


def weigh_experts(scores: Tensor, expert_ids: Tensor, normalise: bool, sum_eps: float, scaling: float) -> Route:
    """See `dspark.ops.route.weigh_experts`."""
    num_rows, count = expert_ids.shape
    weights = torch.empty(num_rows, count, dtype=torch.float32, device=scores.device)
    if num_rows:
        _weigh[(num_rows,)](
            packed(scores),
            packed(expert_ids),
            weights,
            sum_eps,
            scaling,
            scores.shape[1],
            count,
            normalise,
            num_warps=1,
        )
    return Route(expert_ids, weights)
