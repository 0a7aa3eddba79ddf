"""Sums of whole tensors, from the first to the last: of parts that several ranks computed, of sections of a product."""

import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.early import begin
from dspark.ops.triton.elementwise import section_sum
from dspark.ops.triton.launch import new_output, packed, rounded

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _add_parts(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = section_sum(parts, places, inside, count, PARTS, False, False)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


def add_parts(parts: Tensor, out: Tensor, early: bool = False) -> None:
    """Write the float32 sum of parts [n, ...] into `out` [...]; both are contiguous.

    Args:
        early: see `dspark.ops.triton.early`.
    """
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    _add_parts[grid](parts, out, out.numel(), parts.shape[0], _BLOCK, early, num_warps=4, launch_pdl=early)


def sum_parts(parts: Tensor) -> Tensor:
    """See `dspark.ops.parts.sum_parts`."""
    out = new_output(parts, *parts.shape[1:])
    if out.numel():
        add_parts(packed(parts), out)
    return rounded(out, parts)
