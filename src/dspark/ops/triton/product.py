"""Products of rows with bf16 and coded weights: one launch for linear maps and for routed experts.

The weight is the left operand (its values come out of registers), the rows are the right one. A program owns a block
of weight rows and a block of rows, and goes through the columns from first to last in steps of 32; no block shape
changes what is added to an element nor in which order, so a row keeps its bits whatever shares the call.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from dspark.ops.packing import CHUNK, TILE_ROWS, PackedWeight
from dspark.ops.triton.bf16_product import bf16_product
from dspark.ops.triton.coded_product import KINDS, coded_product
from dspark.ops.triton.early import early_launch
from dspark.ops.triton.launch import INTERPRETED

_FEW_ROWS = 32


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
        coded_product[grid](
            x, weight.codes, weight.scales, out, *indices, x.shape[0], out.shape[-2], width, triton.cdiv(depth, CHUNK),
            width // groups, x.shape[1], weight.scale_rows, KINDS[weight.kind], routed, sections, side_by_side,
            shape.rows, shape.more, shape.columns, joins_runs(shape), quant_group, shape.stages, early,
            INTERPRETED, num_warps=shape.warps, launch_pdl=early,
        )  # fmt: skip
    else:
        bf16_product[grid](
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
