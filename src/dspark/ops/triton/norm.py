"""Rows scaled by their root-mean-square: one program a row."""

import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import block_of, new_output, packed, rounded, warps_of

# Longer rows are read in pieces of this many elements, whose squares add up lane by lane before the lanes are joined.
_LONGEST_BLOCK = 8192


@triton.jit
def _normalise(x, weight, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        part = tl.load(x + row * D + start + lanes, mask=start + lanes < D, other=0.0).to(tl.float32)
        squares += part * part
    rstd = tl.rsqrt(tl.sum(squares, 0) / D + eps)
    for start in tl.static_range(0, D, BLOCK):
        inside = start + lanes < D
        part = tl.load(x + row * D + start + lanes, mask=inside, other=0.0).to(tl.float32) * rstd
        if HAS_WEIGHT:
            part *= tl.load(weight + start + lanes, mask=inside, other=0.0)
        tl.store(out + row * D + start + lanes, part.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `dspark.ops.norm.rms_norm`."""
    size = x.shape[-1]
    rows, out = packed(x), new_output(x, *x.shape)
    block = min(block_of(size), _LONGEST_BLOCK)
    grid = (x.numel() // size,)
    if grid[0]:
        _normalise[grid](rows, weight, out, eps, size, block, weight is not None, num_warps=warps_of(block))
    return rounded(out, x)
