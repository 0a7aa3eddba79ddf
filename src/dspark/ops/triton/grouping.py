"""Pairs (row, slot) of a route grouped by expert, so that each touched expert's weights are read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.route import Route
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import packed
from dspark.ops.triton.product import Shape, Tiles

_BLOCK_PAIRS = 1024


@triton.jit
def _held_number(expert_ids, pairs, P, lowest, HELD: tl.constexpr):
    """Numbers of the pairs' experts among the held ones; HELD for any other, more than that where there is no pair."""
    ids = tl.load(expert_ids + pairs, mask=pairs < P, other=0) - lowest
    ids = tl.where((ids < 0) | (ids > HELD), HELD, ids).to(tl.int32)
    return tl.where(pairs < P, ids, HELD + 1)


@triton.jit(do_not_specialize=["P", "last_tile", "lowest"])
def _group(
    expert_ids, order, rows, places, table, P, last_tile, lowest,
    HELD: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program an expert: the places of its pairs, in pair order, and its tiles.

    Experts are numbered from `lowest`. A program behind the `HELD` ones takes the pairs of all experts that are held
    elsewhere: they have the last places and no tile.

    Expert e starts at place s = pairs of lower experts, and its tiles at entry min(e, s) + s // ROWS, which leaves
    every expert at least the entries that it needs; the others say that they hold nothing. Example: tiles of 16,
    20 pairs of expert 5 and 3 of expert 7 -> entries 0 and 1 for expert 5; entry min(6, 20) + 1 = 7 is expert 6's and
    empty; entry 8 is expert 7's.
    """
    begin(EARLY)
    expert = tl.program_id(0)
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


def tile_shape(num_pairs: int) -> Shape:
    """Block sizes for a routed product of `num_pairs` places, as measured on Hopper: few rows an expert at first."""
    if num_pairs <= 12:
        return Shape(8, 64, 5, 4)
    if num_pairs <= 1024:
        return Shape(8, 128, 4 if num_pairs <= 48 else 3, 4)
    return Shape(16 if num_pairs <= 4096 else 32 if num_pairs <= 16384 else 64, 128, 4, 4)


def group_pairs(expert_ids: Tensor, num_experts: int, held: range | None = None) -> tuple[Tensor, ...]:
    """Group the pairs (row, slot) of [T, k] expert ids by expert.

    Args:
        num_experts: in the stacks of weights. held: which ones they are; None where the stacks hold all.
    Returns:
        order [P], the pair at each place; rows [P], its row; places [P], the place itself; table [tiles, 3] of tiles.
    """
    P, tile_rows = expert_ids.numel(), tile_shape(expert_ids.numel()).rows
    num_tiles, early = min(num_experts, P) + P // tile_rows, early_launch()
    order, rows, places = torch.empty(3, P, dtype=torch.int32, device=expert_ids.device)
    table = torch.empty(num_tiles, 3, dtype=torch.int32, device=expert_ids.device)
    _group[(num_experts + (held is not None),)](
        packed(expert_ids.flatten()), order, rows, places, table, P, num_tiles, held.start if held else 0, num_experts,
        expert_ids.shape[1], tile_rows, min(_BLOCK_PAIRS, triton.next_power_of_2(P)), early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
    return order, rows, places, table


def one_row_groups(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """The same of one row, to be filled: its experts are all different, so each of its pairs is a tile."""
    order, rows, places = torch.empty(3, count, dtype=torch.int32, device=device)
    return order, rows, places, torch.empty(count, 3, dtype=torch.int32, device=device)


def tiles_of(route: Route, num_experts: int) -> tuple[Tiles, Tiles]:
    """Tiles of the first product of a route (from rows to places) and of the second (from places to pairs)."""
    order, rows, places, table = route.groups or group_pairs(route.expert_ids, num_experts, route.held)
    tile_rows = tile_shape(route.expert_ids.numel()).rows
    return Tiles(table, rows, places, tile_rows), Tiles(table, places, order, tile_rows)
