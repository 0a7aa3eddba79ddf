"""Experts: two grouped products of rows that are grouped by expert, and a sum in slot order.

No sum runs over programs and nothing is added atomically: each pair (row, slot) has its own output, and the sum over a
row's slots goes from the first to the last.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.experts import Terms
from dspark.ops.packing import PackedWeight
from dspark.ops.route import Route
from dspark.ops.triton import plain_product
from dspark.ops.triton.beside import Beside
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import gated, round_bf16, section_sum
from dspark.ops.triton.grouping import tile_shape, tiles_of
from dspark.ops.triton.launch import INTERPRETED, packed
from dspark.ops.triton.linear import joined_parts, prepared_rows, product_parts, result_dtype
from dspark.ops.triton.product import Tiles, product
from dspark.ops.triton.quantise import rounded_fp8

_COMBINE = 1024

Weights = tuple[Tensor | PackedWeight, Tensor | PackedWeight]
Quantiser = Callable[[Tensor], Tensor]


@triton.jit(do_not_specialize=["R"])
def _gate(
    parts, order, weights, out, R, limit,
    F: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SECTIONS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr, QUANTISE: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up * route weight of one of R rows, rounded as the next product's rows are."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    known = columns < F
    gate = section_sum(parts, row * 2 * F + columns, known, R * (2 * F), SECTIONS, ROUND, PLAIN)
    up = section_sum(parts, row * 2 * F + F + columns, known, R * (2 * F), SECTIONS, ROUND, PLAIN)
    inner = gated(gate, up, limit, HAS_LIMIT)
    if WEIGHTED:
        inner *= tl.load(weights + tl.load(order + row))
    if ROUND:
        inner = round_bf16(inner, PLAIN)
    if QUANTISE:
        inner = rounded_fp8(inner)
    tl.store(out + row * F + columns, inner.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["T", "lowest"])
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
        total += section_sum(shared, row * D + columns, known, T * D, SECTIONS, True, PLAIN)
    tl.store(out + row * D + columns, total.to(out.dtype.element_ty), mask=known)


def gate_rows(
    parts: Tensor,
    dtype: torch.dtype,
    limit: float,
    group: int,
    order: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Inner activations of experts: gated, weighted, quantised to fp8 in groups.

    Args:
        parts: [sections, R, 2F] sums of the projection. dtype: of its values, and of the result.
        limit: clamp of gate and up. group: columns of an fp8 group; 0 leaves the values as they are.
        order: [R] pair of each row. weights: [T, k] float32 of the pairs; without them nothing is weighted.
    Returns:
        [R, F].
    """
    sections, num_rows, size = parts.shape[0], parts.shape[1], parts.shape[2] // 2
    out = torch.empty(num_rows, size, dtype=torch.float32 if INTERPRETED else dtype, device=parts.device)
    width = group or 128
    groups = triton.next_power_of_2(triton.cdiv(512, width))
    grid, early = (num_rows, triton.cdiv(size, groups * width)), early_launch()
    _gate[grid](
        parts, parts if order is None else order, parts if weights is None else packed(weights), out, num_rows, limit,
        size, width, groups, sections, limit > 0, weights is not None, group > 0, dtype == torch.bfloat16, early,
        INTERPRETED, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out.to(dtype)


def combine(placed: Tensor, route: Route, shared: Tensor | None = None) -> Tensor:
    """[T * k, D] outputs of pairs -> [T, D]: float32 sums in slot order; those of experts held elsewhere are not read.

    With `shared` [sections, T, D], the shared expert's rows are added last and the result has the dtype of `placed`.
    """
    slots, held = route.expert_ids.shape[1], route.held
    dtype = torch.float32 if shared is None else placed.dtype
    return _combined(placed, shared, slots, dtype, packed(route.expert_ids), held)


def sum_terms(terms: Terms) -> Tensor:
    """See `dspark.ops.experts.Terms`."""
    if terms.slots is None:
        return _combined(terms.sections[0], terms.sections, 0, terms.dtype)
    return _combined(terms.slots.flatten(0, 1), terms.sections, terms.slots.shape[1], terms.dtype)


def _combined(
    placed: Tensor,
    shared: Tensor | None,
    slots: int,
    dtype: torch.dtype,
    expert_ids: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    num_rows, width = placed.shape[0] // max(slots, 1), placed.shape[1]
    out = torch.empty(num_rows, width, dtype=torch.float32 if INTERPRETED else dtype, device=placed.device)
    grid, early = (num_rows, triton.cdiv(width, _COMBINE)), early_launch()
    _combine[grid](
        placed, placed if shared is None else shared, out, placed if expert_ids is None else expert_ids, num_rows,
        held.start if held else 0, len(held) if held else 0, width, slots, 0 if shared is None else shared.shape[0],
        _COMBINE, early, INTERPRETED, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return out.to(dtype)


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


def pair_outputs(
    x: Tensor, route: Route, experts: Weights, limit: float, group: int, quantise: Quantiser | None = None
) -> Tensor:
    """[T * k, D] outputs of the pairs (row, slot), those of experts held elsewhere unset: three launches.

    Args:
        x: [T, D] bf16 or float32, already quantised. route: k experts a row.
        experts: w13 and w2, stacks of E packed or bf16 weights [2F, D] and [D, F].
        limit: clamp of gate and up. group: columns of an fp8 group in front of w2; 0 leaves them as they are.
        quantise: in front of w2, in launches of its own; with a `group` of 0.
    """
    first, second = tiles_of(route, experts[0].shape[0])
    projected = expert_product(x, experts[0], first)
    inner = gate_rows(projected.unsqueeze(0), x.dtype, limit, group, second.targets, route.weights)
    return expert_product(inner if quantise is None else quantise(inner), experts[1], second)


def routed_experts(
    x: Tensor,
    route: Route,
    w13: Tensor | PackedWeight,
    w2: Tensor | PackedWeight,
    limit: float,
    quantise: Quantiser,
) -> Tensor:
    """See `dspark.ops.experts.routed_experts`; float32 stacks go to the slow product of single sums."""
    if isinstance(w13, Tensor) and isinstance(w2, Tensor) and w13.dtype == torch.float32:
        return plain_product.routed_experts(x, route, w13, w2, limit, quantise)
    return combine(pair_outputs(x, route, (w13, w2), limit, 0, quantise), route)


class SharedRows(NamedTuple):
    """The shared expert's rows as sums [sections, T, D], read behind the branch that makes them."""

    sections: Tensor
    branch: Beside


def shared_expert(x: Tensor, weights: Weights, limit: float, group: int) -> SharedRows:
    """The expert that every row passes through, in three launches beside those that follow.

    Args:
        x: [T, D] bf16, already quantised. weights: w13 and w2, packed or bf16 [1, N, K].
        limit: clamp of gate and up. group: columns of an fp8 group in front of w2; 0 leaves them as they are.
    """
    with Beside(x.device, "shared") as branch:
        inner = gate_rows(product_parts(x, weights[0]), x.dtype, limit, group)
        return SharedRows(product_parts(inner, weights[1]), branch)


def mixture(x: Tensor, route: Route, experts: Weights, shared: SharedRows, limit: float, group: int) -> Tensor | Terms:
    """Routed experts in three launches behind the grouping; the sum with the shared expert is left to the reader.

    Args:
        x: [T, D] bf16. route, experts, limit, group: see `pair_outputs`.
    Returns:
        [T, D] bf16: the routed sum in float32, the shared expert added last. As terms where all experts are here.
    """
    placed = pair_outputs(x, route, experts, limit, group)
    shared.branch.join()
    if route.held is not None:
        return combine(placed, route, shared.sections)
    return Terms(placed.view(x.shape[0], -1, placed.shape[1]), shared.sections, x.dtype)
