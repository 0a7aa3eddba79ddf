"""What kernels of products share: the rows of a routed tile, products added to a block's sums, sums stored."""

import triton
import triton.language as tl

from dspark.ops.triton.elementwise import round_bf16
from dspark.ops.triton.quantise import rounded_fp8


@triton.jit
def routed_tile(table, BLOCKS: tl.constexpr):
    """A program of a routed product: its block of weight rows; expert, first place and number of places of its tile."""
    tile = tl.program_id(0) // BLOCKS
    expert = tl.load(table + 3 * tile).to(tl.int64)
    return tl.program_id(0) % BLOCKS, expert, tl.load(table + 3 * tile + 1), tl.load(table + 3 * tile + 2)


@triton.jit
def routed_rows(sources, targets, places, inside):
    """The rows that are read and written at some places."""
    read = tl.load(sources + places, mask=inside, other=0).to(tl.int64)
    return read, tl.load(targets + places, mask=inside, other=0).to(tl.int64)


@triton.jit
def add_products(weights, rows, acc, PLAIN: tl.constexpr):
    """Add weights [N, k] times rows [T, k] to the sums [N, T]; the interpreter's own product is not row by row."""
    if PLAIN:
        return acc + tl.sum(weights[:, :, None] * tl.trans(rows.to(tl.float32))[None, :, :], 1)
    return tl.dot(weights, tl.trans(rows), acc)


@triton.jit
def store_products(
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
