"""Choice of the best compressed rows without a sort: one program a query.

The rank-`count` score is found by halving the range of float32 bit patterns, which is the order of the numbers once
negative ones are turned around; then one walk in index order takes what is above it, and of its ties the first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import block_of, packed

_LONGEST_BLOCK = 2048
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _ordered(scores, allowed, row, start, C, BLOCK: tl.constexpr):
    """Scores as integers in the same order, and which of them may be picked."""
    places = start + tl.arange(0, BLOCK)
    may = tl.load(allowed + row * C + places, mask=places < C, other=0) != 0
    # Adding zero makes the two zeros one number.
    bits = (tl.load(scores + row * C + places, mask=places < C, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF), may


@triton.jit(do_not_specialize=["C"])
def _pick(scores, allowed, out, C, COUNT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # The largest threshold that at least COUNT rows reach; the lowest one where there are fewer.
    low = tl.full([], _LOWEST, tl.int64)
    high = tl.full([], 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        reached = 0
        for start in range(0, C, BLOCK):
            keys, may = _ordered(scores, allowed, row, start, C, BLOCK)
            reached += tl.sum((may & (keys.to(tl.int64) >= middle)).to(tl.int32), 0)
        low = tl.where(reached >= COUNT, middle, low)
        high = tl.where(reached >= COUNT, high, middle - 1)
    above = 0
    for start in range(0, C, BLOCK):
        keys, may = _ordered(scores, allowed, row, start, C, BLOCK)
        above += tl.sum((may & (keys.to(tl.int64) > low)).to(tl.int32), 0)
    room = COUNT - above
    taken = 0
    ties = 0
    for start in range(0, C, BLOCK):
        keys, may = _ordered(scores, allowed, row, start, C, BLOCK)
        tied = may & (keys.to(tl.int64) == low)
        number = ties + tl.cumsum(tied.to(tl.int32), 0)
        ties += tl.sum(tied.to(tl.int32), 0)
        chosen = (may & (keys.to(tl.int64) > low)) | (tied & (number <= room))
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        taken += tl.sum(chosen.to(tl.int32), 0)
        index = (start + tl.arange(0, BLOCK)).to(tl.int64)
        tl.store(out + row * COUNT + place, index, mask=chosen & (place < COUNT))
    rest = tl.arange(0, BLOCK_OUT)
    tl.store(out + row * COUNT + rest, tl.full([BLOCK_OUT], -1, tl.int64), mask=(rest >= taken) & (rest < COUNT))


def pick_rows(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """See `dspark.ops.index.pick_rows`."""
    num_rows, width = scores.shape
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    if num_rows:
        block = min(block_of(width), _LONGEST_BLOCK)
        _pick[(num_rows,)](
            packed(scores),
            packed(allowed),
            out,
            width,
            count,
            block,
            block_of(count),
            num_warps=4 if block > 512 else 1,
        )
    return out
