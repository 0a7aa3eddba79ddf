"""Products of rows with bf16 and coded weights: one kernel for linear maps and for routed experts.

The weight is the left operand (its values come out of registers), the rows are the right one. A program owns a block
of weight rows and a block of rows, and goes through the columns from first to last in steps of 32; no block shape
changes what is added to an element nor in which order, so a row keeps its bits whatever shares the call.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.packing import CHUNK, RUN, TILE_ROWS, Kind, PackedWeight
from dspark.ops.triton.dequantise import fp4_runs, fp8_runs, plain_fp4_runs, plain_fp8_runs
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16
from dspark.ops.triton.launch import INTERPRETED
from dspark.ops.triton.quantise import rounded_fp8

_CHUNK, _RUN, _TILE = tl.constexpr(CHUNK), tl.constexpr(RUN), tl.constexpr(TILE_ROWS)
_FP4, _FP8 = tl.constexpr(0), tl.constexpr(1)
_FEW_ROWS = 32
_KINDS = {Kind.FP4: _FP4, Kind.FP8: _FP8}


@dataclass(frozen=True)
class Shape:
    """Block sizes of a launch; they set its speed, never its bits. `more` rows are a second block beside `rows`."""

    rows: int
    columns: int
    stages: int
    warps: int
    more: int = 0


@dataclass(frozen=True, eq=False)
class Tiles:
    """Rows of a routed product, grouped by expert.

    Attributes:
        table: [num_tiles, 3] int32: expert, first place, places; a tile of no places does nothing.
        sources: [P] int32 row of x at each place. targets: [P] int32 row of the output.
        rows: most places a tile.
    """

    table: Tensor
    sources: Tensor
    targets: Tensor
    rows: int


@triton.jit
def add_products(weights, rows, acc, PLAIN: tl.constexpr):
    """Add weights [N, k] times rows [T, k] to the sums [N, T]; the interpreter's own product is not row by row."""
    if PLAIN:
        return acc + tl.sum(weights[:, :, None] * tl.trans(rows.to(tl.float32))[None, :, :], 1)
    return tl.dot(weights, tl.trans(rows), acc)


@triton.jit
def _side_by_side(left, right, N: tl.constexpr, K: tl.constexpr):
    """[N, 2 K] of two [N, K] tiles; a thread's registers, one after the other."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (N, 2 * K))


@triton.jit
def _load_rows(x, places, lanes, inside):
    """[T, lanes] of the rows that start at `places`."""
    return tl.load(x + (places[:, None] + lanes[None, :]), mask=inside[:, None], other=0.0)


@triton.jit
def _add_runs(w0, w1, w2, w3, x, places, inside, acc, PLAIN: tl.constexpr):
    """Add a chunk to the sums, one run of columns after the other."""
    lanes = tl.arange(0, _RUN)
    acc = add_products(w0, _load_rows(x, places, lanes, inside), acc, PLAIN)
    acc = add_products(w1, _load_rows(x + _RUN, places, lanes, inside), acc, PLAIN)
    acc = add_products(w2, _load_rows(x + 2 * _RUN, places, lanes, inside), acc, PLAIN)
    return add_products(w3, _load_rows(x + 3 * _RUN, places, lanes, inside), acc, PLAIN)


@triton.jit
def _coded_runs(codes, scales, code_places, scale_places, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """A chunk's weights: its four runs of columns, each [N, 32]."""
    lanes = tl.arange(0, _RUN)
    fields = tl.load(scales + scale_places)
    words = tl.load(codes + code_places)
    if KIND == _FP4:
        if PLAIN:
            return plain_fp4_runs(words, tl.load(codes + _partners(code_places, lanes)), fields)
        return fp4_runs(words, fields)
    second_places = code_places + _TILE * _RUN
    more = tl.load(codes + second_places)
    if PLAIN:
        w0, w1 = plain_fp8_runs(words, tl.load(codes + _partners(code_places, lanes)), fields, 0)
        w2, w3 = plain_fp8_runs(more, tl.load(codes + _partners(second_places, lanes)), fields, 2)
    else:
        w0, w1 = fp8_runs(words, fields, 0)
        w2, w3 = fp8_runs(more, fields, 2)
    return w0, w1, w2, w3


@triton.jit
def _partners(places, lanes):
    """Places of the elements that share a 32-bit word with those at `places`."""
    return places + (1 - 2 * (lanes % 2))[None, :]


@triton.jit
def _sum_chunks(
    x, codes, scales, code_places, scale_places, places, inside, more_places, more_inside,
    CHUNKS: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    MORE: tl.constexpr, COLUMNS: tl.constexpr, JOINED: tl.constexpr, STAGES: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Sums [N, rows] over the first `CHUNKS` chunks; the second block of rows only where `MORE`.

    Few rows take a run at a time, which needs the fewest registers; many take whole chunks (`JOINED`), so that the
    matrix unit runs on while the next codes are decoded. Both add the same products in the same order.
    """
    lanes = tl.arange(0, _CHUNK)
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    more = tl.zeros([COLUMNS, MORE if MORE else 16], dtype=tl.float32)
    for _ in tl.range(0, CHUNKS, num_stages=STAGES):
        w0, w1, w2, w3 = _coded_runs(codes, scales, code_places, scale_places, KIND, PLAIN)
        if not JOINED:
            acc = _add_runs(w0, w1, w2, w3, x, places, inside, acc, PLAIN)
            if MORE:
                more = _add_runs(w0, w1, w2, w3, x, more_places, more_inside, more, PLAIN)
        else:
            left, right = _side_by_side(w0, w1, COLUMNS, _RUN), _side_by_side(w2, w3, COLUMNS, _RUN)
            weights = _side_by_side(left, right, COLUMNS, 2 * _RUN)
            acc = add_products(weights, _load_rows(x, places, lanes, inside), acc, PLAIN)
            if MORE:
                more = add_products(weights, _load_rows(x, more_places, lanes, more_inside), more, PLAIN)
        codes += WORDS
        scales += SCALES
        x += _CHUNK
    return acc, more


@triton.jit
def _store(
    out, written, columns, inside, acc, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    QUANT_GROUP: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Store sums [COLUMNS, ROWS], quantised as bf16 rows are where `QUANT_GROUP` columns share a scale."""
    places = written[:, None] * N + columns[None, :]
    known = inside[:, None] & (columns < N)[None, :]
    values = tl.trans(acc)
    if QUANT_GROUP > 0:
        groups = tl.reshape(round_bf16(values, PLAIN), (ROWS * (COLUMNS // QUANT_GROUP), QUANT_GROUP))
        values = tl.reshape(rounded_fp8(groups), (ROWS, COLUMNS))
    tl.store(out + places, values.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["T", "P"])
def _coded_product(
    x, codes, scales, out, table, sources, targets, T, P,
    N: tl.constexpr, CHUNKS: tl.constexpr, GROUP_ROWS: tl.constexpr, X_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, ROUTED: tl.constexpr, SECTIONS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr,
    JOINED: tl.constexpr, QUANT_GROUP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Product with coded weights; out is [T or P, N], or [SECTIONS, T or P, N] where sections run side by side."""
    BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    PADDED: tl.constexpr = (N + 127) // 128 * 128
    WORDS: tl.constexpr = _TILE * _RUN * (1 + KIND)
    SCALES: tl.constexpr = (PADDED + SCALE_ROWS - 1) // SCALE_ROWS
    OWN: tl.constexpr = CHUNKS // SECTIONS
    slots = tl.arange(0, ROWS)
    more_slots = ROWS + tl.arange(0, MORE if MORE else 16)
    begin(EARLY)
    if ROUTED:
        block = tl.program_id(0) % BLOCKS
        tile = tl.program_id(0) // BLOCKS
        expert = tl.load(table + 3 * tile).to(tl.int64)
        places = tl.load(table + 3 * tile + 1) + slots
        count = tl.load(table + 3 * tile + 2)
        if count == 0:
            return
        inside = slots < count
        read = tl.load(sources + places, mask=inside, other=0).to(tl.int64)
        written = tl.load(targets + places, mask=inside, other=0).to(tl.int64)
        more_read = read
        more_inside = inside
        codes += expert * (PADDED * CHUNKS * (WORDS // _TILE))
        scales += expert * (SCALES * CHUNKS)
    else:
        block = tl.program_id(1)
        first = tl.program_id(0).to(tl.int64) * (ROWS + MORE)
        read = first + slots
        inside = read < T
        written = read
        more_read = first + more_slots
        more_inside = more_read < T
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    x += (block * COLUMNS // GROUP_ROWS) * (CHUNKS * _CHUNK)
    code_places = (columns // _TILE) * (CHUNKS * WORDS) + (columns % _TILE) * _RUN
    code_places = code_places[:, None] + tl.arange(0, _RUN)[None, :]
    scale_places = columns // SCALE_ROWS
    if SIDE_BY_SIDE:
        section = tl.program_id(2)
        x += section * (OWN * _CHUNK)
        codes += section * (OWN * WORDS)
        scales += section * (OWN * SCALES)
        out += section.to(tl.int64) * P * N
    acc, more = _sum_chunks(
        x, codes, scales, code_places, scale_places, read * X_WIDTH, inside, more_read * X_WIDTH, more_inside,
        OWN, WORDS, SCALES, KIND, ROWS, MORE, COLUMNS, JOINED, STAGES, PLAIN,
    )  # fmt: skip
    if not SIDE_BY_SIDE:
        for _ in range(1, SECTIONS):
            x += OWN * _CHUNK
            codes += OWN * WORDS
            scales += OWN * SCALES
            next_acc, next_more = _sum_chunks(
                x, codes, scales, code_places, scale_places, read * X_WIDTH, inside, more_read * X_WIDTH, more_inside,
                OWN, WORDS, SCALES, KIND, ROWS, MORE, COLUMNS, JOINED, STAGES, PLAIN,
            )  # fmt: skip
            acc += next_acc
            more += next_more
    _store(out, written, columns, inside, acc, N, ROWS, COLUMNS, QUANT_GROUP, PLAIN)
    if MORE:
        _store(out, more_read, columns, more_inside, more, N, MORE, COLUMNS, QUANT_GROUP, PLAIN)


@triton.jit
def _sum_depth(
    x, weight, x_places, weight_places, inside, is_column, lanes,
    DEPTH: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Sums [N, rows] over the first `DEPTH` columns."""
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in tl.range(0, DEPTH, STEP, num_stages=STAGES):
        if DEPTH % STEP == 0:
            w = tl.load(weight + weight_places, mask=is_column, other=0.0)
            rows = tl.load(x + x_places, mask=inside, other=0.0)
        else:
            known = (start + lanes < DEPTH)[None, :]
            w = tl.load(weight + weight_places, mask=is_column & known, other=0.0)
            rows = tl.load(x + x_places, mask=inside & known, other=0.0)
        acc = add_products(w.to(tl.float32) if PLAIN else w, rows, acc, PLAIN)
        weight += STEP
        x += STEP
    return acc


@triton.jit(do_not_specialize=["T", "P"])
def _plain_product(
    x, weight, out, table, sources, targets, T, P,
    N: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, X_WIDTH: tl.constexpr, ROUTED: tl.constexpr,
    SECTIONS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The same with bf16 weights [E, N, K] as they are stored."""
    BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    OWN: tl.constexpr = K // SECTIONS
    slots = tl.arange(0, ROWS)
    begin(EARLY)
    if ROUTED:
        block = tl.program_id(0) % BLOCKS
        tile = tl.program_id(0) // BLOCKS
        expert = tl.load(table + 3 * tile).to(tl.int64)
        places = tl.load(table + 3 * tile + 1) + slots
        count = tl.load(table + 3 * tile + 2)
        if count == 0:
            return
        inside = slots < count
        read = tl.load(sources + places, mask=inside, other=0).to(tl.int64)
        written = tl.load(targets + places, mask=inside, other=0).to(tl.int64)
        weight += expert * (N * K)
    else:
        block = tl.program_id(1)
        read = tl.program_id(0).to(tl.int64) * ROWS + slots
        inside = read < T
        written = read
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, STEP)
    x += (block * COLUMNS // GROUP_ROWS) * K
    x_places = (read * X_WIDTH)[:, None] + lanes[None, :]
    weight_places = columns.to(tl.int64)[:, None] * K + lanes[None, :]
    is_column = (columns < N)[:, None]
    if SIDE_BY_SIDE:
        section = tl.program_id(2)
        x += section * OWN
        weight += section * OWN
        out += section.to(tl.int64) * P * N
    is_row = inside[:, None]
    acc = _sum_depth(
        x, weight, x_places, weight_places, is_row, is_column, lanes, OWN, STEP, ROWS, COLUMNS, STAGES, PLAIN
    )
    if not SIDE_BY_SIDE:
        for _ in range(1, SECTIONS):
            x += OWN
            weight += OWN
            acc += _sum_depth(
                x, weight, x_places, weight_places, is_row, is_column, lanes, OWN, STEP, ROWS, COLUMNS, STAGES, PLAIN
            )
    _store(out, written, columns, inside, acc, N, ROWS, COLUMNS, 0, PLAIN)


def product(
    x: Tensor,
    weight: Tensor | PackedWeight,
    out: Tensor,
    shape: Shape,
    tiles: Tiles | None = None,
    groups: int = 1,
    sections: int = 1,
    quant_group: int = 0,
) -> None:
    """Launch one product.

    Args:
        x: [T, groups * K] bf16, contiguous and aligned.
        weight: packed, or bf16 [E, N, K].
        out: [T, N], or [P, N] where `tiles` names the rows that are written; with a leading dimension of `sections`
            they run side by side and each leaves its own sums.
        groups: the weight's rows fall into this many equal parts, each of which reads its own K columns of `x`.
        sections: see `sections_of`.
        quant_group: columns of a coded product that share a scale of its bf16 result; 0 where that is not quantised.
    """
    _, width, depth = weight.shape
    routed, side_by_side, early = tiles is not None, out.dim() == 3, early_launch()
    indices = (tiles.table, tiles.sources, tiles.targets) if tiles else (x, x, x)
    blocks, row_blocks = triton.cdiv(width, shape.columns), triton.cdiv(x.shape[0], shape.rows + shape.more)
    programs = (tiles.table.shape[0] * blocks, 1) if tiles else (row_blocks, blocks)
    grid = (*programs, sections if side_by_side else 1)
    if isinstance(weight, PackedWeight):
        _coded_product[grid](
            x, weight.codes, weight.scales, out, *indices, x.shape[0], out.shape[-2], width, triton.cdiv(depth, CHUNK),
            width // groups, x.shape[1], weight.scale_rows, _KINDS[weight.kind], routed, sections, side_by_side,
            shape.rows, shape.more, shape.columns, joins_runs(shape), quant_group, shape.stages, early,
            INTERPRETED, num_warps=shape.warps, launch_pdl=early,
        )  # fmt: skip
    else:
        _plain_product[grid](
            x, weight, out, *indices, x.shape[0], out.shape[-2], width, depth, width // groups, x.shape[1], routed,
            sections, side_by_side, shape.rows, shape.columns, plain_step(shape), shape.stages, early,
            INTERPRETED, num_warps=shape.warps, launch_pdl=early,
        )  # fmt: skip


def joins_runs(shape: Shape) -> bool:
    """Whether a product takes whole chunks at a time.

    Only with Hopper's matrix instruction for groups of four warps: the older one may then be given the columns in
    another order, which changes bits.
    """
    is_grouped = shape.columns >= TILE_ROWS and shape.warps % 4 == 0 and early_launch()
    return is_grouped and shape.rows + shape.more > _FEW_ROWS


def plain_step(shape: Shape) -> int:
    """Columns of a step of a bf16 product."""
    return 128 if shape.rows * shape.columns <= 64 * 128 else 64
