"""Scores, choice and weights of experts, and the pairs of few rows grouped by expert in the same launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.route import Route
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import section_sum
from dspark.ops.triton.grouping import MOST_COMPARED, empty_groups, group_few, tile_shape
from dspark.ops.triton.launch import INTERPRETED, block_of, packed
from dspark.ops.triton.linear import linear, product_parts

# Below this, 1 + e has lost too many bits of e for a logarithm, and five terms of the series are exact enough.
_SMALL = tl.constexpr(0.03)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) of a float32 block."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    return tl.maximum(x, 0.0) + tl.where(e < _SMALL, series, tl.log(1.0 + e))


@triton.jit(do_not_specialize=["T", "last_tile", "lowest"])
def _route(
    parts, bias, table_ids, token_ids, chosen, weights, order, pair_rows, places, table,
    T, last_tile, lowest, sum_eps, scaling,
    E: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, SECTIONS: tl.constexpr,
    CHOOSES: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr, TILE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of gate logits, summed over sections; `PAIRS` > 0 where these are all and their pairs are grouped."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < T
    lanes, slots = tl.arange(0, BLOCK)[None, :], tl.arange(0, SLOTS)[None, :]
    inside = is_row[:, None] & (lanes < E)
    logits = section_sum(parts, row[:, None] * E + lanes, inside, T * E, SECTIONS, False, PLAIN)
    scores = tl.sqrt(_softplus(logits))
    if CHOOSES:
        biased = tl.where(lanes < E, scores + tl.load(bias + lanes, mask=lanes < E, other=0.0), float("-inf"))
    else:
        given = table_ids + tl.load(token_ids + row, mask=is_row, other=0) * COUNT
    found = tl.zeros([ROWS, SLOTS], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for slot in tl.static_range(COUNT):
        if CHOOSES:
            best = tl.max(biased, 1)
            # The lower of two equal experts; a row of numbers that are none still names experts that exist.
            expert = tl.minimum(tl.min(tl.where(biased == best[:, None], lanes, BLOCK), 1), E - 1).to(tl.int64)
            biased = tl.where(lanes == expert[:, None], float("-inf"), biased)
        else:
            expert = tl.load(given + slot, mask=is_row, other=0)
        tl.store(chosen + row * COUNT + slot, expert, mask=is_row)
        score = tl.sum(tl.where(lanes == expert[:, None], scores, 0.0), 1)
        total += score
        found = tl.where(slots == slot, score[:, None], found)
    if NORMALISE:
        found = found / (total + sum_eps)[:, None]
    tl.store(weights + row[:, None] * COUNT + slots, found * scaling, mask=is_row[:, None] & (slots < COUNT))
    if PAIRS > 0:
        tl.debug_barrier()  # the choices are read again, by other threads
        group_few(chosen, order, pair_rows, places, table, T * COUNT, last_tile, lowest, HELD, COUNT, TILE_ROWS, PAIRS)


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
    """See `dspark.ops.route.route_rows_of`; few rows come grouped by expert, in two launches."""
    num_rows, experts = x.shape[0], weight.shape[0]
    chosen = torch.empty(num_rows, count, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_rows, count, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return Route(chosen, weights, held)
    parts = _gate_parts(x, weight)
    P, num_held, early = chosen.numel(), experts if held is None else len(held), early_launch()
    is_grouped = P <= MOST_COMPARED
    groups = empty_groups(P, num_held, x.device) if is_grouped else (chosen,) * 4
    rows = block_of(num_rows) if is_grouped else 1
    tables = (parts, parts) if given is None else (packed(given[0]), packed(given[1]))
    _route[(triton.cdiv(num_rows, rows),)](
        parts, parts if bias is None else packed(bias), *tables, chosen, weights, *groups,
        num_rows, groups[3].shape[0], held.start if held else 0, sum_eps, scaling,
        experts, count, block_of(count), block_of(experts), parts.shape[0], given is None, normalise, rows, num_held,
        tile_shape(P).rows, block_of(P) if is_grouped else 0, early, INTERPRETED,
        num_warps=8 if rows > 8 else 4 if is_grouped else 1, launch_pdl=early,
    )  # fmt: skip
    return Route(chosen, weights, held, groups if is_grouped else None)


def _gate_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Gate logits [sections, T, E] float32, still to be summed."""
    if x.dtype == torch.bfloat16 and weight.dtype == torch.bfloat16:
        return product_parts(x, packed(weight).unsqueeze(0), torch.float32)
    return linear(x, weight, torch.float32).unsqueeze(0)
