"""The sum of parts that several ranks computed: one program a block of elements."""

import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import new_output, packed, rounded

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _sum(parts, out, count, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < count
    total = tl.load(parts + lanes, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts + rank * count.to(tl.int64) + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + lanes, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor) -> Tensor:
    """See `dspark.ops.parts.sum_parts`."""
    out = new_output(parts, *parts.shape[1:])
    count = out.numel()
    if count:
        _sum[(triton.cdiv(count, _BLOCK),)](packed(parts), out, count, parts.shape[0], _BLOCK, num_warps=4)
    return rounded(out, parts)
