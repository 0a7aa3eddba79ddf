"""Writing of rows into a store: one program a row."""

import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import INTERPRETED, packed

_BLOCK = 1024


@triton.jit
def _write(store, places, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place < 0:
        return
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < K
    found = tl.load(rows + row * K + lanes, mask=inside, other=0.0)
    tl.store(store + place * K + lanes, found.to(store.dtype.element_ty), mask=inside)


def write_rows(store: Tensor, places: Tensor, rows: Tensor) -> None:
    """See `dspark.ops.rows.write_rows`; the store is contiguous."""
    num_rows, size = rows.shape
    if num_rows:
        kept = rows.to(store.dtype) if INTERPRETED else rows
        _write[(num_rows, triton.cdiv(size, _BLOCK))](store, packed(places), packed(kept), size, _BLOCK, num_warps=4)
