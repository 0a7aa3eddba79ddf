"""What kernels of products share: a block's products are added to its sums, and the sums are stored."""

import triton
import triton.language as tl

from dspark.ops.triton.elementwise import round_bf16
from dspark.ops.triton.quantise import rounded_fp8


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
