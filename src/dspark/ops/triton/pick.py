"""Choice of the best compressed rows without a sort: one program a query, and a part of its rows where there are many.

The rank-`count` score is found by quartering the range of float32 bit patterns, which is the order of the numbers once
negative ones are turned around; then one walk in index order takes what is above it, and of its ties the first. Of more
rows than one program holds in registers, each part leaves its own best ones first: those of the query are among them,
and they stay in order, so that the same rule about ties chooses the same rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import order_key
from dspark.ops.triton.launch import block_of, packed

_LONGEST_BLOCK = 8192  # rows that one program chooses from, where a part is no larger
_PART = 4096  # rows of a part
_LEAST_SHRINKAGE = 4  # a part is so many times what it leaves, at least
_LOWEST = tl.constexpr(-(2**31))
_FIELD = tl.constexpr(2**21 - 1)


@triton.jit
def _ordered(scores, candidates, visible, row, places, C, NARROWED: tl.constexpr):
    """Scores as integers in the same order, and which of them may be picked."""
    may = places < visible
    if NARROWED:
        may = may & (tl.load(candidates + row * C + places, mask=may, other=0) != 0)
    return order_key(tl.load(scores + row * C + places, mask=may, other=0.0)), may


@triton.jit
def _choose(keys, may, COUNT: tl.constexpr):
    """Which of the keys are the best `COUNT`, the first of equal ones; their places in order; and how many they are."""
    # The largest threshold that at least COUNT keys reach, two bits at a time; the lowest one where there are fewer.
    low = tl.full([], _LOWEST, tl.int32)
    step = tl.full([], 1 << 30, tl.int32)
    for _ in range(16):
        counts = (keys >= low + step).to(tl.int64) + ((keys >= low + 2 * step).to(tl.int64) << 21)
        counts += (keys >= low + 3 * step).to(tl.int64) << 42
        reached = tl.sum(tl.where(may, counts, 0), 0)
        one, two, three = reached & _FIELD, (reached >> 21) & _FIELD, reached >> 42
        low += ((one >= COUNT).to(tl.int32) + (two >= COUNT).to(tl.int32) + (three >= COUNT).to(tl.int32)) * step
        step = step >> 2
    above, tied = may & (keys > low), may & (keys == low)
    room = COUNT - tl.sum(above.to(tl.int32), 0)
    chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    return chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1, tl.sum(chosen.to(tl.int32), 0)


@triton.jit(do_not_specialize=["C"])
def _pick(
    keys, numbers, visible, candidates, key_out, out, C, COUNT: tl.constexpr, NARROWED: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best of a part of a row: of scores first, then of the keys and numbers of a shortlist, -1 where none is."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    if IS_FIRST:
        own, may = _ordered(keys, candidates, tl.minimum(tl.load(visible + row), C), row, places, C, NARROWED)
        number = places
    else:
        number = tl.load(numbers + row * C + places, mask=places < C, other=-1)
        may = number >= 0
        own = tl.load(keys + row * C + places, mask=may, other=0)
    chosen, place, taken = _choose(own, may, COUNT)
    first = (row * tl.num_programs(1) + tl.program_id(1)) * COUNT
    tl.store(out + first + place, number.to(out.dtype.element_ty), mask=chosen)
    if not IS_LAST:
        tl.store(key_out + first + place, own, mask=chosen)
    rest = tl.arange(0, BLOCK_OUT)
    nothing = tl.full([BLOCK_OUT], -1, out.dtype.element_ty)
    tl.store(out + first + rest, nothing, mask=(rest >= taken) & (rest < COUNT))


class _Shortlist(NamedTuple):
    """The best of all parts of rows: keys [T, W] int32 and their numbers, -1 behind the last of a part."""

    keys: Tensor
    numbers: Tensor


def pick_rows(scores: Tensor, visible: Tensor, candidates: Tensor | None, count: int) -> Tensor:
    """See `dspark.ops.index.pick_rows`."""
    num_rows, width = scores.shape
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    if not num_rows:
        return out
    scores, visible = packed(scores), packed(visible)
    chosen_from = None if candidates is None else packed(candidates[:, :width])
    shortlist, block = None, max(_PART, _LEAST_SHRINKAGE * block_of(count))
    while width > max(_LONGEST_BLOCK, block):
        parts = triton.cdiv(width, block)
        keys, numbers = torch.empty(2, num_rows, parts * count, dtype=torch.int32, device=scores.device)
        _launch(scores, visible, chosen_from, shortlist, keys, numbers, count, block)
        shortlist, width = _Shortlist(keys, numbers), parts * count
    _launch(scores, visible, chosen_from, shortlist, None, out, count, block_of(width))
    return out


def _launch(
    scores: Tensor,
    visible: Tensor,
    candidates: Tensor | None,
    shortlist: _Shortlist | None,
    keys: Tensor | None,
    out: Tensor,
    count: int,
    block: int,
) -> None:
    """One step: the best of scores, or of a shortlist, into the keys and numbers of the next; without keys the last."""
    source, numbers = (scores, out) if shortlist is None else shortlist
    width, early = source.shape[1], early_launch()
    _pick[(source.shape[0], triton.cdiv(width, block))](
        source, numbers, visible, source if candidates is None else candidates, out if keys is None else keys, out,
        width, count, candidates is not None, shortlist is None, keys is None, block, block_of(count), early,
        num_warps=min(max(block // 512, 1), 16), launch_pdl=early,
    )  # fmt: skip
