"""Products of rows with bf16 and coded weights: one kernel for linear maps and for routed experts.

The weight is the left operand (its values come out of registers), the rows are the right one. A program owns a block
of weight rows and a block of rows, and goes through the columns from first to last in steps of 32; no block shape
changes what is added to an element nor in which order, so a row keeps its bits whatever shares the call.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.packing import CHUNK, RUN, TILE_ROWS, Kind, PackedWeight
from dspark.ops.triton import plain_product
from dspark.ops.triton.dequantise import fp4_runs, fp8_runs, plain_fp4_runs, plain_fp8_runs
from dspark.ops.triton.launch import INTERPRETED, packed

_CHUNK, _RUN, _TILE = tl.constexpr(CHUNK), tl.constexpr(RUN), tl.constexpr(TILE_ROWS)
_FP4, _FP8 = tl.constexpr(0), tl.constexpr(1)
_KINDS = {Kind.FP4: _FP4, Kind.FP8: _FP8}


@dataclass(frozen=True)
class Shape:
    """Block sizes of a launch; they set its speed, never its bits."""

    rows: int
    columns: int
    stages: int
    warps: int


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
def _step(weight, x, places, lanes, inside, acc, RUN_INDEX: tl.constexpr, PLAIN: tl.constexpr):
    """Add one run of 32 columns: weight [N, 32] times the rows' columns."""
    rows = tl.load(x + places[:, None] + (lanes + RUN_INDEX * _RUN)[None, :], mask=inside[:, None], other=0.0)
    if PLAIN:
        return tl.dot(weight, tl.trans(rows.to(tl.float32)), acc, input_precision="ieee")
    return tl.dot(weight, tl.trans(rows), acc)


@triton.jit(do_not_specialize=["T"])
def _coded_product(
    x,
    codes,
    scales,
    out,
    table,
    sources,
    targets,
    T,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    X_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    KIND: tl.constexpr,
    ROUTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    PADDED: tl.constexpr = (N + 127) // 128 * 128
    WORDS: tl.constexpr = _TILE * _RUN * (1 + KIND)
    SCALES: tl.constexpr = (PADDED + SCALE_ROWS - 1) // SCALE_ROWS
    slots = tl.arange(0, ROWS)
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
        codes += expert * (PADDED * CHUNKS * (WORDS // _TILE))
        scales += expert * (SCALES * CHUNKS)
    else:
        block = tl.program_id(1)
        read = tl.program_id(0).to(tl.int64) * ROWS + slots
        inside = read < T
        written = read
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, _RUN)
    x_places = read * X_WIDTH + (block * COLUMNS // GROUP_ROWS) * (CHUNKS * _CHUNK)
    code_places = (columns // _TILE) * (CHUNKS * WORDS) + (columns % _TILE) * _RUN
    code_places = code_places[:, None] + lanes[None, :]
    partner_places = code_places if not PLAIN else code_places + (1 - 2 * (lanes % 2))[None, :]
    scale_places = columns // SCALE_ROWS
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for _ in tl.range(0, CHUNKS, num_stages=STAGES):
        fields = tl.load(scales + scale_places)
        words = tl.load(codes + code_places)
        if KIND == _FP4:
            if PLAIN:
                w0, w1, w2, w3 = plain_fp4_runs(words, tl.load(codes + partner_places), fields)
            else:
                w0, w1, w2, w3 = fp4_runs(words, fields)
        else:
            more = tl.load(codes + (code_places + _TILE * _RUN))
            if PLAIN:
                w0, w1 = plain_fp8_runs(words, tl.load(codes + partner_places), fields, 0)
                w2, w3 = plain_fp8_runs(more, tl.load(codes + (partner_places + _TILE * _RUN)), fields, 2)
            else:
                w0, w1 = fp8_runs(words, fields, 0)
                w2, w3 = fp8_runs(more, fields, 2)
        acc = _step(w0, x, x_places, lanes, inside, acc, 0, PLAIN)
        acc = _step(w1, x, x_places, lanes, inside, acc, 1, PLAIN)
        acc = _step(w2, x, x_places, lanes, inside, acc, 2, PLAIN)
        acc = _step(w3, x, x_places, lanes, inside, acc, 3, PLAIN)
        codes += WORDS
        scales += SCALES
        x += _CHUNK
    out_places = written[:, None] * N + columns[None, :]
    tl.store(
        out + out_places,
        tl.trans(acc).to(out.dtype.element_ty),
        mask=inside[:, None] & (columns < N)[None, :],
    )


@triton.jit(do_not_specialize=["T"])
def _plain_product(
    x,
    weight,
    out,
    table,
    sources,
    targets,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    X_WIDTH: tl.constexpr,
    ROUTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """The same with bf16 weights [E, N, K] as they are stored."""
    BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    slots = tl.arange(0, ROWS)
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
    lanes = tl.arange(0, DEPTH)
    x_places = (read * X_WIDTH + (block * COLUMNS // GROUP_ROWS) * K)[:, None] + lanes[None, :]
    weight_places = columns.to(tl.int64)[:, None] * K + lanes[None, :]
    is_column = (columns < N)[:, None]
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        if K % DEPTH == 0:
            w = tl.load(weight + weight_places, mask=is_column, other=0.0)
            rows = tl.load(x + x_places, mask=inside[:, None], other=0.0)
        else:
            known = (start + lanes < K)[None, :]
            w = tl.load(weight + weight_places, mask=is_column & known, other=0.0)
            rows = tl.load(x + x_places, mask=inside[:, None] & known, other=0.0)
        if PLAIN:
            acc = tl.dot(w.to(tl.float32), tl.trans(rows.to(tl.float32)), acc, input_precision="ieee")
        else:
            acc = tl.dot(w, tl.trans(rows), acc)
        weight += DEPTH
        x += DEPTH
    out_places = written[:, None] * N + columns[None, :]
    tl.store(
        out + out_places,
        tl.trans(acc).to(out.dtype.element_ty),
        mask=inside[:, None] & (columns < N)[None, :],
    )


def block_shape(num_rows: int, kind: Kind | None, routed: bool) -> Shape:
    """Block sizes for a call, or for the tiles of a routed one with `num_rows` rows in all."""
    if routed:
        rows = 16 if num_rows <= 1024 else 32 if num_rows <= 4096 else 64
        return Shape(rows, 64, 4, 4)
    rows = min(max(triton.next_power_of_2(num_rows), 16), 128)
    return Shape(rows, 64 if rows <= 32 else 128, 4, 4 if rows <= 64 else 8)


def product(
    x: Tensor,
    weight: Tensor | PackedWeight,
    out: Tensor,
    shape: Shape,
    tiles: Tiles | None = None,
    groups: int = 1,
) -> None:
    """Launch one product.

    Args:
        x: [T, groups * K] bf16, contiguous and aligned.
        weight: packed, or bf16 [E, N, K].
        out: [T, N], or [P, N] where `tiles` names the rows that are written.
        groups: the weight's rows fall into this many equal parts, each of which reads its own K columns of `x`.
    """
    _, width, depth = weight.shape
    indices = (tiles.table, tiles.sources, tiles.targets) if tiles else (x, x, x)
    blocks = triton.cdiv(width, shape.columns)
    grid = (tiles.table.shape[0] * blocks,) if tiles else (triton.cdiv(x.shape[0], shape.rows), blocks)
    routed = tiles is not None
    options = {"num_warps": shape.warps}
    if isinstance(weight, PackedWeight):
        _coded_product[grid](
            x, weight.codes, weight.scales, out, *indices, x.shape[0], width, triton.cdiv(depth, CHUNK),
            width // groups, x.shape[1], weight.scale_rows, _KINDS[weight.kind], routed, shape.rows, shape.columns,
            shape.stages, INTERPRETED, **options,
        )  # fmt: skip
    else:
        _plain_product[grid](
            x, weight, out, *indices, x.shape[0], width, depth, width // groups, x.shape[1], routed, shape.rows,
            shape.columns, plain_depth(shape), shape.stages, INTERPRETED, **options,
        )  # fmt: skip


def plain_depth(shape: Shape) -> int:
    """Columns of a step of a bf16 product."""
    return 128 if shape.rows * shape.columns <= 64 * 128 else 64


def linear(
    x: Tensor, weight: Tensor | PackedWeight, out_dtype: torch.dtype | None = None, groups: int = 1
) -> Tensor:
    """Product with a weight; see `dspark.ops.linear.linear`.

    Args:
        x: [T, groups * K]; bf16, or float32, which is taken apart into three bf16 rows and so used exactly.
        weight: packed or bf16 [N, K]; a float32 tensor goes to the slow product of single sums.
        out_dtype: of the result; that of `x` without it.
        groups: of the weight's rows, each with its own K columns of `x`.
    Returns:
        [T, N].
    """
    if isinstance(weight, Tensor) and weight.dtype == torch.float32:
        return plain_product.linear(x, weight).to(out_dtype or x.dtype)
    stack = weight if isinstance(weight, PackedWeight) else packed(weight).unsqueeze(0)
    _, width, depth = stack.shape
    num_rows, wanted = x.shape[0], out_dtype or x.dtype
    rows = prepared_rows(x, depth, isinstance(stack, PackedWeight), groups)
    out = torch.empty(rows.shape[0], width, dtype=result_dtype(x, wanted), device=x.device)
    if num_rows:
        kind = stack.kind if isinstance(stack, PackedWeight) else None
        product(rows, stack, out, block_shape(rows.shape[0], kind, False), groups=groups)
    if x.dtype == torch.float32:
        out = joined_parts(out)
    return out.to(wanted)


def result_dtype(x: Tensor, wanted: torch.dtype) -> torch.dtype:
    """What a kernel writes; the interpreter's stores truncate, and parts of float32 rows are still to be added."""
    return torch.float32 if INTERPRETED or x.dtype == torch.float32 else wanted


def prepared_rows(x: Tensor, depth: int, in_chunks: bool, groups: int = 1) -> Tensor:
    """bf16 rows as the kernels read them: the parts of float32 rows stacked, columns filled up to whole chunks."""
    if x.dtype == torch.float32:
        x = torch.cat(bf16_parts(x))
    if in_chunks and depth % CHUNK:
        x = F.pad(x.unflatten(1, (groups, depth)), (0, -depth % CHUNK)).flatten(1)
    return packed(x)


def bf16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bf16 tensors whose sum is the float32 tensor `x`, largest first."""
    first = x.to(torch.bfloat16)
    rest = x - first.float()
    second = rest.to(torch.bfloat16)
    return first, second, (rest - second.float()).to(torch.bfloat16)


def joined_parts(products: Tensor) -> Tensor:
    """[3 T, N] products of the parts of rows -> [T, N], smallest parts first."""
    first, second, third = products.chunk(3)
    return (third + second) + first
