"""Scores, choice and weights of experts: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.route import Route
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import order_key, section_sum
from dspark.ops.triton.grouping import one_row_groups
from dspark.ops.triton.launch import INTERPRETED, block_of, packed
from dspark.ops.triton.linear import linear, product_parts

# Below this, 1 + e has lost too many bits of e for a logarithm, and five terms of the series are exact enough.
_SMALL = tl.constexpr(0.03)
_NEVER = tl.constexpr(-(2**31))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) of a float32 block."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    return tl.maximum(x, 0.0) + tl.where(e < _SMALL, series, tl.log(1.0 + e))


@triton.jit
def _ordered(x):
    """`order_key` without `_NEVER`: what is no number comes last, so that a row of nothing else names real experts."""
    return order_key(tl.where(x == x, x, float("-inf")))


@triton.jit(do_not_specialize=["T", "lowest"])
def _route(
    parts, bias, table_ids, token_ids, chosen, weights, order, pair_rows, places, table, T, lowest, sum_eps, scaling,
    E: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, SECTIONS: tl.constexpr,
    CHOOSES: tl.constexpr, NORMALISE: tl.constexpr, HELD: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """One row of gate logits, summed over sections; with `GROUPS` it is the only one, and its pairs are tiles."""
    row = tl.program_id(0).to(tl.int64)
    lanes, slots = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = lanes < E
    if CHOOSES:
        offsets = tl.load(bias + lanes, mask=inside, other=0.0)
    begin(EARLY)
    scores = tl.sqrt(_softplus(section_sum(parts, row * E + lanes, inside, T * E, SECTIONS, False, PLAIN)))
    if CHOOSES:
        order_keys = tl.where(inside, _ordered(scores + offsets), _NEVER)
    else:
        table_ids += tl.load(token_ids + row) * COUNT
    score_bits = scores.to(tl.int32, bitcast=True)
    found = tl.zeros([SLOTS], dtype=tl.float32)
    total = 0.0
    for slot in tl.static_range(COUNT):
        if CHOOSES:
            # The lower of two equal experts.
            expert = tl.min(tl.where(order_keys == tl.max(order_keys, 0), lanes, BLOCK), 0).to(tl.int64)
            order_keys = tl.where(lanes == expert, _NEVER, order_keys)
        else:
            expert = tl.load(table_ids + slot)
        tl.store(chosen + row * COUNT + slot, expert)
        score = tl.sum(tl.where(lanes == expert, score_bits, 0), 0).to(tl.float32, bitcast=True)
        total += score
        found = tl.where(slots == slot, score, found)
        if GROUPS:
            number = expert - lowest
            is_held = (number >= 0) & (number < HELD)
            tl.store(table + 3 * slot, tl.where(is_held, number, 0).to(tl.int32))
            tl.store(table + 3 * slot + 1, slot)
            tl.store(table + 3 * slot + 2, is_held.to(tl.int32))
    if NORMALISE:
        found = found / (total + sum_eps)
    tl.store(weights + row * COUNT + slots, found * scaling, mask=slots < COUNT)
    if GROUPS:
        tl.store(order + slots, slots, mask=slots < COUNT)
        tl.store(pair_rows + slots, slots * 0, mask=slots < COUNT)
        tl.store(places + slots, slots, mask=slots < COUNT)


def route_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    given: tuple[Tensor, Tensor] | None,
    count: int,
    normalise: bool,
    sum_eps: float,
    scaling: float,
    held: range | None = None,
) -> Route:
    """See `dspark.ops.route.route_rows_of`; a single row comes grouped by expert."""
    num_rows, experts = x.shape[0], weight.shape[0]
    chosen = torch.empty(num_rows, count, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_rows, count, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return Route(chosen, weights, held)
    parts = _gate_parts(x, weight)
    num_held, early = experts if held is None else len(held), early_launch()
    groups = one_row_groups(count, x.device) if num_rows == 1 else None
    tables = (parts, parts) if given is None else (packed(given[0]), packed(given[1]))
    _route[(num_rows,)](
        parts, parts if bias is None else packed(bias), *tables, chosen, weights, *(groups or (chosen,) * 4),
        num_rows, held.start if held else 0, sum_eps, scaling, experts, count, block_of(count), block_of(experts),
        parts.shape[0], given is None, normalise, num_held, groups is not None, early, INTERPRETED, num_warps=1,
        launch_pdl=early,
    )  # fmt: skip
    return Route(chosen, weights, held, groups)


def _gate_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Gate logits [sections, T, E] float32, still to be summed."""
    if x.dtype == torch.bfloat16 and weight.dtype == torch.bfloat16:
        return product_parts(x, packed(weight).unsqueeze(0), torch.float32)
    return linear(x, weight, torch.float32).unsqueeze(0)
