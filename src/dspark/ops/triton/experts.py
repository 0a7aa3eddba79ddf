"""Routed experts: rows sorted by expert on the device, two grouped products, and a sum in slot order.

No sum runs over programs and nothing is added atomically: each pair (row, slot) has its own output, and the sum over a
row's slots goes from the first to the last.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.packing import PackedWeight
from dspark.ops.route import Route
from dspark.ops.triton import plain_product
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16, sigmoid
from dspark.ops.triton.launch import INTERPRETED, packed
from dspark.ops.triton.linear import joined_parts, prepared_rows, product_parts, result_dtype
from dspark.ops.triton.product import Shape, Tiles, product
from dspark.ops.triton.quantise import rounded_fp8

_BLOCK_PAIRS = 1024
_COMBINE = 1024


@triton.jit(do_not_specialize=["P", "last_tile"])
def _sort_pairs(
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


@triton.jit
def _held_number(expert_ids, pairs, P, lowest, HELD: tl.constexpr):
    """Numbers of the pairs' experts among the held ones; HELD for any other, more than that where there is no pair."""
    ids = tl.load(expert_ids + pairs, mask=pairs < P, other=0) - lowest
    ids = tl.where((ids < 0) | (ids > HELD), HELD, ids)
    return tl.where(pairs < P, ids, HELD + 1)


@triton.jit(do_not_specialize=["P", "T"])
def _gate(
    projected, order, weights, out, shared, shared_out, P, T, limit,
    F: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SECTIONS: tl.constexpr,
    HAS_LIMIT: tl.constexpr, QUANTISE: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up * route weight of one place, rounded as the next product's rows are.

    Rows from `P` on are those of the shared expert, `SHARED` wide: `SECTIONS` sums to add first, and no route weight.
    """
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if row < P:
        known = columns < F
        gate = tl.load(projected + row * 2 * F + columns, mask=known, other=0.0).to(tl.float32)
        up = tl.load(projected + row * 2 * F + F + columns, mask=known, other=0.0).to(tl.float32)
        factor = tl.load(weights + tl.load(order + row))
        out += row * F
    else:
        row -= P
        known = columns < SHARED
        step = T * (2 * SHARED)
        gate = _section_sum(shared, row * 2 * SHARED + columns, known, step, SECTIONS, ROUND, PLAIN)
        up = _section_sum(shared, row * 2 * SHARED + SHARED + columns, known, step, SECTIONS, ROUND, PLAIN)
        factor = 1.0
        out = shared_out + row * SHARED
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    inner = gate * sigmoid(gate) * up * factor
    if ROUND:
        inner = round_bf16(inner, PLAIN)
    if QUANTISE:
        inner = rounded_fp8(inner)
    tl.store(out + columns, inner.to(out.dtype.element_ty), mask=known)


@triton.jit
def _section_sum(parts, places, known, step, SECTIONS: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr):
    """Sum over sections from first to last, `step` elements apart, rounded as a linear map's result is."""
    total = tl.load(parts + places, mask=known, other=0.0).to(tl.float32)
    for section in tl.static_range(1, SECTIONS):
        total += tl.load(parts + section * step.to(tl.int64) + places, mask=known, other=0.0).to(tl.float32)
    return round_bf16(total, PLAIN) if ROUND else total


@triton.jit(do_not_specialize=["T"])
def _combine(
    placed, shared, out, expert_ids, T, lowest,
    HELD: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, SECTIONS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Sum over a row's slots from first to last, then the shared expert's row where `SECTIONS` > 0.

    Where `HELD` > 0, only the slots of experts from `lowest` to that many behind it count.
    """
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = columns < D
    placed += row * SLOTS * D
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in tl.static_range(0, SLOTS):
        wanted = known
        if HELD > 0:
            number = tl.where(known, tl.load(expert_ids + row * SLOTS + slot) - lowest, -1)
            wanted = (number >= 0) & (number < HELD)
        total += tl.load(placed + slot * D + columns, mask=wanted, other=0.0).to(tl.float32)
    if SECTIONS > 0:
        total += _section_sum(shared, row * D + columns, known, T * D, SECTIONS, True, PLAIN)
    tl.store(out + row * D + columns, total.to(out.dtype.element_ty), mask=known)


def tile_shape(num_pairs: int) -> Shape:
    """Block sizes for a routed product of `num_pairs` places, as measured on Hopper: few rows an expert at first."""
    if num_pairs <= 12:
        return Shape(8, 64, 5, 2)
    if num_pairs <= 1024:
        return Shape(8, 128, 4 if num_pairs <= 48 else 3, 4)
    return Shape(16 if num_pairs <= 4096 else 32 if num_pairs <= 16384 else 64, 128, 4, 4)


def sort_pairs(expert_ids: Tensor, num_experts: int, tile_rows: int, held: range | None = None) -> tuple[Tiles, Tiles]:
    """Group the pairs (row, slot) of [T, k] expert ids by expert.

    Args:
        num_experts: in the stacks of weights. held: which ones they are; None where the stacks hold all.
    Returns:
        tiles of the first product (from rows to places) and of the second (from places to pairs).
    """
    num_rows, slots = expert_ids.shape
    P, device = num_rows * slots, expert_ids.device
    num_tiles = min(num_experts, P) + P // tile_rows
    order, rows, places = torch.empty(3, P, dtype=torch.int32, device=device)
    table = torch.empty(num_tiles, 3, dtype=torch.int32, device=device)
    ids = packed(expert_ids.flatten())
    block = min(_BLOCK_PAIRS, triton.next_power_of_2(P))
    early = early_launch()
    _sort_pairs[(num_experts + (held is not None),)](
        ids, order, rows, places, table, P, num_tiles, held.start if held else 0, num_experts, slots, tile_rows, block,
        early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return Tiles(table, rows, places, tile_rows), Tiles(table, places, order, tile_rows)


def _sorted_route(route: Route, num_experts: int) -> tuple[Tiles, Tiles]:
    """The tiles of both products of a route, with stacks of `num_experts`."""
    ids = route.expert_ids
    return sort_pairs(ids, num_experts, tile_shape(ids.numel()).rows, route.held)


def gate_places(
    projected: Tensor, order: Tensor, weights: Tensor, limit: float, group: int, shared: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Inner activations of the routed and of the shared expert: gated, weighted, quantised to fp8 in groups.

    Args:
        projected: [P, 2F] in place order. order: [P] pair of each place. weights: [T, k] float32 of the pairs.
        limit: clamp of gate and up. group: columns of an fp8 group; 0 leaves the values as they are.
        shared: [sections, T, 2F'] sums of the shared expert, which may have another width.
    Returns:
        [P, F] and [T, F'] (empty without `shared`) in the dtype of `projected`.
    """
    num_places, size = projected.shape[0], projected.shape[1] // 2
    width, dtype = group or 128, result_dtype(projected, projected.dtype)
    parts = projected.unsqueeze(0)[:, :0] if shared is None else shared
    (sections, num_shared), beside = parts.shape[:2], parts.shape[2] // 2
    out = torch.empty(num_places, size, dtype=dtype, device=projected.device)
    shared_out = torch.empty(num_shared, beside, dtype=dtype, device=projected.device)
    groups = triton.next_power_of_2(triton.cdiv(512, width))
    grid, early = (num_places + num_shared, triton.cdiv(max(size, beside), groups * width)), early_launch()
    _gate[grid](
        projected, order, weights, out, parts, shared_out, num_places, num_shared, limit, size, beside, width, groups,
        sections, limit > 0, group > 0, projected.dtype == torch.bfloat16, early, INTERPRETED, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
    return out.to(projected.dtype), shared_out.to(projected.dtype)


def combine(placed: Tensor, route: Route, shared: Tensor | None = None) -> Tensor:
    """[T * k, D] outputs of pairs -> [T, D]: float32 sums in slot order; those of experts held elsewhere are not read.

    With `shared` [sections, T, D], the shared expert's rows are added last and the result has the dtype of `placed`.
    """
    (num_rows, slots), width, held = route.expert_ids.shape, placed.shape[1], route.held
    dtype = torch.float32 if shared is None else result_dtype(placed, placed.dtype)
    out = torch.empty(num_rows, width, dtype=dtype, device=placed.device)
    grid, early = (num_rows, triton.cdiv(width, _COMBINE)), early_launch()
    sections = 0 if shared is None else shared.shape[0]
    parts = placed if shared is None else shared
    _combine[grid](
        placed, parts, out, packed(route.expert_ids), num_rows, held.start if held else 0, len(held) if held else 0,
        width, slots, sections, _COMBINE, early, INTERPRETED, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out if shared is None else out.to(placed.dtype)


def expert_product(x: Tensor, weight: Tensor | PackedWeight, tiles: Tiles) -> Tensor:
    """[P, N] in the dtype of `x` [.., K]: the rows that `tiles` names times the weights of their experts."""
    _, width, depth = weight.shape
    is_packed = isinstance(weight, PackedWeight)
    P = tiles.sources.shape[0]
    shape = tile_shape(P)
    out = torch.empty(P, width, dtype=result_dtype(x, x.dtype), device=x.device)
    if x.dtype != torch.float32:
        product(prepared_rows(x, depth, is_packed), weight, out, shape, tiles)
        return out.to(x.dtype)
    parts = [torch.empty_like(out) for _ in range(3)]
    for rows, part in zip(prepared_rows(x, depth, is_packed).chunk(3), parts, strict=True):
        product(packed(rows), weight, part, shape, tiles)
    return joined_parts(torch.cat(parts))


def routed_experts_grouped(
    x: Tensor, route: Route, w13: Tensor | PackedWeight, w2: Tensor | PackedWeight, limit: float, group: int
) -> Tensor:
    """Sum of the chosen experts' outputs in slot order, float32; see `dspark.ops.experts.routed_experts`.

    Args:
        x: [T, D] bf16 or float32, already quantised. route: k experts a row.
        w13, w2: stacks of E packed or bf16 weights [2F, D] and [D, F].
        limit: clamp of gate and up. group: columns of an fp8 group in front of w2; 0 leaves them as they are.
    """
    first, second = _sorted_route(route, w13.shape[0])
    projected = expert_product(x, w13, first)
    inner, _ = gate_places(projected, second.targets, packed(route.weights), limit, group)
    return combine(expert_product(inner, w2, second), route)


def routed_experts(
    x: Tensor,
    route: Route,
    w13: Tensor | PackedWeight,
    w2: Tensor | PackedWeight,
    limit: float,
    quantise: Callable[[Tensor], Tensor],
) -> Tensor:
    """See `dspark.ops.experts.routed_experts`; float32 stacks go to the slow product of single sums."""
    if isinstance(w13, Tensor) and isinstance(w2, Tensor) and w13.dtype == torch.float32:
        return plain_product.routed_experts(x, route, w13, w2, limit, quantise)
    first, second = _sorted_route(route, w13.shape[0])
    projected = expert_product(x, w13, first)
    inner = quantise(gate_places(projected, second.targets, packed(route.weights), limit, 0)[0])
    return combine(expert_product(inner, w2, second), route)


def mixture(
    x: Tensor,
    route: Route,
    experts: tuple[Tensor | PackedWeight, Tensor | PackedWeight],
    shared: tuple[Tensor | PackedWeight, Tensor | PackedWeight],
    limit: float,
    group: int,
) -> Tensor:
    """Routed and shared experts in seven launches: the routed sum in float32, the shared expert added last.

    Args:
        x: [T, D] bf16, already quantised. route: k experts a row.
        experts: w13 and w2 stacks, packed or bf16. shared: w13 and w2 of the shared expert, packed or bf16 [1, N, K].
        limit: clamp of gate and up. group: columns of an fp8 group in front of w2; 0 leaves them as they are.
    Returns:
        [T, D] bf16.
    """
    first, second = _sorted_route(route, experts[0].shape[0])
    projected = expert_product(x, experts[0], first)
    beside = product_parts(x, shared[0])
    inner, shared_inner = gate_places(projected, second.targets, packed(route.weights), limit, group, beside)
    placed = expert_product(inner, experts[1], second)
    return combine(placed, route, product_parts(shared_inner, shared[1]))
