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
from dspark.ops.triton.elementwise import sigmoid
from dspark.ops.triton.launch import INTERPRETED, packed
from dspark.ops.triton.product import (
    Tiles,
    block_shape,
    joined_parts,
    prepared_rows,
    product,
    result_dtype,
)
from dspark.ops.triton.quantise import _inverse_power, _power_of_two_ceiling, _round_e4m3

_BLOCK_PAIRS = 1024
_COMBINE = 1024


@triton.jit(do_not_specialize=["P", "last_tile"])
def _sort_pairs(
    expert_ids, order, rows, places, table, P, last_tile, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program an expert: the places of its pairs, in pair order, and its tiles.

    Expert e starts at place s = pairs of lower experts, and its tiles at entry min(e, s) + s // ROWS, which leaves
    every expert at least the entries that it needs; the others say that they hold nothing. Example: tiles of 16,
    20 pairs of expert 5 and 3 of expert 7 -> entries 0 and 1 for expert 5; entry min(6, 20) + 1 = 7 is expert 6's and
    empty; entry 8 is expert 7's.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first = 0
    count = 0
    for start in range(0, P, BLOCK):
        ids = tl.load(expert_ids + start + lanes, mask=start + lanes < P, other=2147483647)
        first += tl.sum((ids < expert).to(tl.int32), 0)
        count += tl.sum((ids == expert).to(tl.int32), 0)
    if count > 0:
        place = first
        for start in range(0, P, BLOCK):
            ids = tl.load(expert_ids + start + lanes, mask=start + lanes < P, other=2147483647)
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
    for tile in range(entry, behind):
        begin = (tile - entry) * ROWS
        tl.store(table + 3 * tile, expert)
        tl.store(table + 3 * tile + 1, first + begin)
        tl.store(table + 3 * tile + 2, tl.minimum(tl.maximum(count - begin, 0), ROWS))


@triton.jit
def _round_bf16(x, PLAIN: tl.constexpr):
    """Nearest bf16 value, ties to even; the interpreter's own conversion truncates."""
    if PLAIN:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _gate(
    projected, order, weights, out, limit,
    F: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HAS_LIMIT: tl.constexpr, QUANTISE: tl.constexpr,
    ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up * route weight of one place, rounded as the next product's rows are."""
    place = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    known = columns < F
    projected += place * 2 * F
    gate = tl.load(projected + columns, mask=known, other=0.0).to(tl.float32)
    up = tl.load(projected + F + columns, mask=known, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    inner = gate * sigmoid(gate) * up * tl.load(weights + tl.load(order + place))
    if ROUND:
        inner = _round_bf16(inner, PLAIN)
    if QUANTISE:
        bits = _power_of_two_ceiling(tl.maximum(tl.max(tl.abs(inner), 1), 1e-4) * (1.0 / 448.0))[:, None]
        codes = _round_e4m3(inner * _inverse_power(bits).to(tl.float32, bitcast=True))
        inner = codes * bits.to(tl.float32, bitcast=True)
    tl.store(out + place * F + columns, inner.to(out.dtype.element_ty), mask=known)


@triton.jit
def _combine(placed, out, D: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    placed += row * SLOTS * D
    total = tl.load(placed + columns, mask=columns < D, other=0.0).to(tl.float32)
    for slot in tl.static_range(1, SLOTS):
        total += tl.load(placed + slot * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + columns, total, mask=columns < D)


def sort_pairs(expert_ids: Tensor, num_experts: int, tile_rows: int) -> tuple[Tiles, Tiles]:
    """Group the pairs (row, slot) of [T, k] expert ids by expert.

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
    _sort_pairs[(num_experts,)](ids, order, rows, places, table, P, num_tiles, slots, tile_rows, block, num_warps=4)
    return Tiles(table, rows, places, tile_rows), Tiles(table, places, order, tile_rows)


def gate_places(projected: Tensor, order: Tensor, weights: Tensor, limit: float, group: int) -> Tensor:
    """Inner activations [P, F] of projected places [P, 2F]: gated, weighted, quantised to fp8 in groups (0: not)."""
    num_places, size = projected.shape[0], projected.shape[1] // 2
    width = group or 128
    out = torch.empty(num_places, size, dtype=result_dtype(projected, projected.dtype), device=projected.device)
    groups = triton.next_power_of_2(triton.cdiv(512, width))
    grid = (num_places, triton.cdiv(size, groups * width))
    _gate[grid](
        projected, order, weights, out, limit, size, width, groups, limit > 0, group > 0,
        projected.dtype == torch.bfloat16, INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out.to(projected.dtype)


def combine(placed: Tensor, slots: int) -> Tensor:
    """[T * k, D] outputs of pairs -> [T, D] float32, added in slot order."""
    num_rows, width = placed.shape[0] // slots, placed.shape[1]
    out = torch.empty(num_rows, width, dtype=torch.float32, device=placed.device)
    _combine[(num_rows, triton.cdiv(width, _COMBINE))](placed, out, width, slots, _COMBINE, num_warps=4)
    return out


def expert_product(x: Tensor, weight: Tensor | PackedWeight, tiles: Tiles) -> Tensor:
    """[P, N] in the dtype of `x` [.., K]: the rows that `tiles` names times the weights of their experts."""
    _, width, depth = weight.shape
    is_packed = isinstance(weight, PackedWeight)
    P = tiles.sources.shape[0]
    shape = block_shape(P, weight.kind if isinstance(weight, PackedWeight) else None, True)
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
    slots = route.expert_ids.shape[1]
    first, second = sort_pairs(route.expert_ids, w13.shape[0], block_shape(route.expert_ids.numel(), None, True).rows)
    projected = expert_product(x, w13, first)
    inner = gate_places(projected, second.targets, packed(route.weights), limit, group)
    return combine(expert_product(inner, w2, second), slots)


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
    slots = route.expert_ids.shape[1]
    first, second = sort_pairs(route.expert_ids, w13.shape[0], block_shape(route.expert_ids.numel(), None, True).rows)
    projected = expert_product(x, w13, first)
    inner = quantise(gate_places(projected, second.targets, packed(route.weights), limit, 0))
    return combine(expert_product(inner, w2, second), slots)
