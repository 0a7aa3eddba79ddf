"""Pairs (row, slot) of a route grouped by expert, so that each touched expert's weights are read once.

Few pairs are compared with each other by one program, which a router's kernel can call itself; many are counted by one
program an expert. Both give places and tiles that make the same products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.route import Route
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import packed
from dspark.ops.triton.product import Shape, Tiles

MOST_COMPARED = 128  # pairs that one program compares with each other
_BLOCK_PAIRS = 1024


@triton.jit
def _held_number(expert_ids, pairs, P, lowest, HELD: tl.constexpr):
    """Numbers of the pairs' experts among the held ones; HELD for any other, more than that where there is no pair."""
    ids = tl.load(expert_ids + pairs, mask=pairs < P, other=0) - lowest
    ids = tl.where((ids < 0) | (ids > HELD), HELD, ids).to(tl.int32)
    return tl.where(pairs < P, ids, HELD + 1)


@triton.jit
def _group_many(
    expert_ids, order, rows, places, table, P, last_tile, lowest, expert,
    HELD: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program an expert: the places of its pairs, in pair order, and its tiles.

    Expert e starts at place s = pairs of lower experts, and its tiles at entry min(e, s) + s // ROWS, which leaves
    every expert at least the entries that it needs; the others say that they hold nothing. Example: tiles of 16,
    20 pairs of expert 5 and 3 of expert 7 -> entries 0 and 1 for expert 5; entry min(6, 20) + 1 = 7 is expert 6's and
    empty; entry 8 is expert 7's.
    """
    lanes = tl.arange(0, BLOCK)
    first = 0
    count = 0
    for start in range(0, P, BLOCK):
        ids = _held_number(expert_ids, start + lanes, P, lowest, HELD)
        first += tl.sum((ids < expert).to(tl.int32), 0)
        count += tl.sum((ids == expert).to(tl.int32), 0)
    if count > 0:
        place = first
        for start in range(0, P, BLOCK):
            ids = _held_number(expert_ids, start + lanes, P, lowest, HELD)
            own = (ids == expert).to(tl.int32)
            mine = place + tl.cumsum(own, 0) - own
            pairs = start + lanes
            tl.store(order + mine, pairs, mask=own != 0)
            tl.store(rows + mine, pairs // SLOTS, mask=own != 0)
            tl.store(places + mine, mine, mask=own != 0)
            place += tl.sum(own, 0)
    stop = first + count
    entry = tl.minimum(expert, first) + first // ROWS
    behind = tl.minimum(expert + 1, stop) + stop // ROWS
    if expert == tl.num_programs(0) - 1:
        behind = last_tile
    if expert == HELD:
        count = 0
    for tile in range(entry, behind):
        done = (tile - entry) * ROWS
        tl.store(table + 3 * tile, expert)
        tl.store(table + 3 * tile + 1, first + done)
        tl.store(table + 3 * tile + 2, tl.minimum(tl.maximum(count - done, 0), ROWS))


@triton.jit
def group_few(
    expert_ids, order, rows, places, table, P, last_tile, lowest,
    HELD: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for up to `BLOCK` pairs: a pair's place is the number of pairs of lower experts or before it.

    Tiles follow each other without gaps: the n-th pair of an expert starts one where n is a multiple of `ROWS`, at the
    entry that counts the starts at lower places. Pairs of experts held elsewhere have the last places and no tile.
    """
    pairs = tl.arange(0, BLOCK)
    mine = _held_number(expert_ids, pairs, P, lowest, HELD)
    own, other = mine[:, None], _held_number(expert_ids, pairs, P, lowest, HELD)[None, :]
    before, behind = pairs[None, :] < pairs[:, None], pairs[:, None] < pairs[None, :]
    ahead = (other < own) | ((other == own) & before)
    place = tl.sum(ahead.to(tl.int32), 1)
    rank = tl.sum(((other == own) & before).to(tl.int32), 1)
    others_rank = tl.sum(((other == own) & behind).to(tl.int32), 0)
    others_start = (others_rank % ROWS == 0)[None, :] & (other < HELD)
    entry = tl.sum((ahead & others_start).to(tl.int32), 1)
    count = tl.sum((other == own).to(tl.int32), 1) - rank
    known, starts = pairs < P, (rank % ROWS == 0) & (mine < HELD)
    tl.store(order + place, pairs, mask=known)
    tl.store(rows + place, pairs // SLOTS, mask=known)
    tl.store(places + place, place, mask=known)
    tl.store(table + 3 * entry, mine, mask=starts)
    tl.store(table + 3 * entry + 1, place, mask=starts)
    tl.store(table + 3 * entry + 2, tl.minimum(count, ROWS), mask=starts)
    empty = tl.sum(starts.to(tl.int32), 0) + tl.arange(0, 2 * BLOCK)
    tl.store(table + 3 * empty, 0, mask=empty < last_tile)
    tl.store(table + 3 * empty + 2, 0, mask=empty < last_tile)


@triton.jit(do_not_specialize=["P", "last_tile", "lowest"])
def _group(
    expert_ids, order, rows, places, table, P, last_tile, lowest,
    HELD: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    if FEW:
        group_few(expert_ids, order, rows, places, table, P, last_tile, lowest, HELD, SLOTS, ROWS, BLOCK)
    else:
        expert = tl.program_id(0)
        _group_many(expert_ids, order, rows, places, table, P, last_tile, lowest, expert, HELD, SLOTS, ROWS, BLOCK)


def tile_shape(num_pairs: int) -> Shape:
    """Block sizes for a routed product of `num_pairs` places, as measured on Hopper: few rows an expert at first."""
    if num_pairs <= 12:
        return Shape(8, 64, 5, 2)
    if num_pairs <= 1024:
        return Shape(8, 128, 4 if num_pairs <= 48 else 3, 4)
    return Shape(16 if num_pairs <= 4096 else 32 if num_pairs <= 16384 else 64, 128, 4, 4)


def empty_groups(num_pairs: int, num_experts: int, device: torch.device) -> tuple[Tensor, ...]:
    """What a grouping writes: order, rows and places [P], and the table [tiles, 3] of the tiles that it may need."""
    order, rows, places = torch.empty(3, num_pairs, dtype=torch.int32, device=device)
    num_tiles = min(num_experts, num_pairs) + num_pairs // tile_shape(num_pairs).rows
    return order, rows, places, torch.empty(num_tiles, 3, dtype=torch.int32, device=device)


def group_pairs(expert_ids: Tensor, num_experts: int, held: range | None = None) -> tuple[Tensor, ...]:
    """Group the pairs (row, slot) of [T, k] expert ids by expert.

    Args:
        num_experts: in the stacks of weights. held: which ones they are; None where the stacks hold all.
    Returns:
        order [P], the pair at each place; rows [P], its row; places [P], the place itself; table of tiles.
    """
    P = expert_ids.numel()
    groups = empty_groups(P, num_experts, expert_ids.device)
    few, early = P <= MOST_COMPARED, early_launch()
    block = min(_BLOCK_PAIRS, triton.next_power_of_2(P))
    grid = (1,) if few else (num_experts + (held is not None),)
    _group[grid](
        packed(expert_ids.flatten()), *groups, P, groups[3].shape[0], held.start if held else 0, num_experts,
        expert_ids.shape[1], tile_shape(P).rows, block, few, early, num_warps=8 if block == MOST_COMPARED else 4,
        launch_pdl=early,
    )  # fmt: skip
    return groups


def tiles_of(route: Route, num_experts: int) -> tuple[Tiles, Tiles]:
    """Tiles of the first product of a route (from rows to places) and of the second (from places to pairs)."""
    order, rows, places, table = route.groups or group_pairs(route.expert_ids, num_experts, route.held)
    tile_rows = tile_shape(route.expert_ids.numel()).rows
    return Tiles(table, rows, places, tile_rows), Tiles(table, places, order, tile_rows)
