"""Choice of the best compressed rows without a sort: one program a query.

The rank-`count` score is found by quartering the range of float32 bit patterns, which is the order of the numbers once
negative ones are turned around; then one walk in index order takes what is above it, and of its ties the first. Scores
that fit into one block are read once and stay in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import block_of, packed

_LONGEST_BLOCK = 16384
_LOWEST = tl.constexpr(-(2**31))
_FIELD = tl.constexpr(2**21 - 1)


@triton.jit
def _ordered(scores, candidates, visible, row, start, C, NARROWED: tl.constexpr, BLOCK: tl.constexpr):
    """Scores as integers in the same order, and which of them may be picked."""
    places = start + tl.arange(0, BLOCK)
    may = places < visible
    if NARROWED:
        may = may & (tl.load(candidates + row * C + places, mask=may, other=0) != 0)
    # Adding zero makes the two zeros one number.
    bits = (tl.load(scores + row * C + places, mask=may, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF), may


@triton.jit
def _reached(keys, may, low, step):
    """How many keys reach low + step, low + 2 step and low + 3 step, each in 21 bits."""
    counts = (keys >= low + step).to(tl.int64) + ((keys >= low + 2 * step).to(tl.int64) << 21)
    counts += (keys >= low + 3 * step).to(tl.int64) << 42
    return tl.sum(tl.where(may, counts, 0), 0)


@triton.jit
def _above(keys, may, low):
    return tl.sum((may & (keys > low)).to(tl.int32), 0)


@triton.jit
def _take(keys, may, out, start, low, room, ties, taken, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the chosen places of a block in order; returns how many ties and rows there are up to here."""
    tied = may & (keys == low)
    number = ties + tl.cumsum(tied.to(tl.int32), 0)
    chosen = (may & (keys > low)) | (tied & (number <= room))
    place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
    index = (start + tl.arange(0, BLOCK)).to(tl.int64)
    tl.store(out + place, index, mask=chosen & (place < COUNT))
    return ties + tl.sum(tied.to(tl.int32), 0), taken + tl.sum(chosen.to(tl.int32), 0)


@triton.jit(do_not_specialize=["C"])
def _pick(
    scores, visible, candidates, out, C, COUNT: tl.constexpr, NARROWED: tl.constexpr, BLOCK: tl.constexpr,
    IS_ONE: tl.constexpr, BLOCK_OUT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin(EARLY)
    seen = tl.minimum(tl.load(visible + row), C)
    if IS_ONE:
        keys, may = _ordered(scores, candidates, seen, row, 0, C, NARROWED, BLOCK)
    # The largest threshold that at least COUNT rows reach, two bits at a time; the lowest one where there are fewer.
    low = tl.full([], _LOWEST, tl.int32)
    step = tl.full([], 1 << 30, tl.int32)
    for _ in range(16):
        if IS_ONE:
            reached = _reached(keys, may, low, step)
        else:
            reached = tl.zeros([], tl.int64)
            for start in range(0, C, BLOCK):
                part, allowed = _ordered(scores, candidates, seen, row, start, C, NARROWED, BLOCK)
                reached += _reached(part, allowed, low, step)
        one, two, three = reached & _FIELD, (reached >> 21) & _FIELD, reached >> 42
        low += ((one >= COUNT).to(tl.int32) + (two >= COUNT).to(tl.int32) + (three >= COUNT).to(tl.int32)) * step
        step = step >> 2
    ties = 0
    taken = 0
    if IS_ONE:
        room = COUNT - _above(keys, may, low)
        ties, taken = _take(keys, may, out + row * COUNT, 0, low, room, ties, taken, COUNT, BLOCK)
    else:
        above = 0
        for start in range(0, C, BLOCK):
            part, allowed = _ordered(scores, candidates, seen, row, start, C, NARROWED, BLOCK)
            above += _above(part, allowed, low)
        for start in range(0, C, BLOCK):
            part, allowed = _ordered(scores, candidates, seen, row, start, C, NARROWED, BLOCK)
            ties, taken = _take(part, allowed, out + row * COUNT, start, low, COUNT - above, ties, taken, COUNT, BLOCK)
    rest = tl.arange(0, BLOCK_OUT)
    tl.store(out + row * COUNT + rest, tl.full([BLOCK_OUT], -1, tl.int64), mask=(rest >= taken) & (rest < COUNT))


def pick_rows(scores: Tensor, visible: Tensor, candidates: Tensor | None, count: int) -> Tensor:
    """See `dspark.ops.index.pick_rows`."""
    num_rows, width = scores.shape
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    if num_rows:
        block, early = min(block_of(width), _LONGEST_BLOCK), early_launch()
        narrowed = scores if candidates is None else candidates[:, :width]
        _pick[(num_rows,)](
            packed(scores), packed(visible), packed(narrowed), out, width, count, candidates is not None, block,
            block >= width, block_of(count), early, num_warps=min(max(block // 512, 1), 16), launch_pdl=early,
        )  # fmt: skip
    return out
