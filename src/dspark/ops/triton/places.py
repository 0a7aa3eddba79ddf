"""Index arithmetic of a pass: one program a row and block of places."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.places import GroupPlaces, RowPlaces
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import block_of, packed

_BLOCK = 512


@triton.jit
def _ring_place(slot, position, ring_rows):
    """See `dspark.ops.places.ring_places`."""
    return tl.where((slot < 0) | (position < 0), -1, slot * ring_rows + position % ring_rows)


@triton.jit(do_not_specialize=["ring_rows"])
def _window(slots, last, out, ring_rows, COUNT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    begin(EARLY)
    position = tl.load(last + row) + (lanes - (COUNT - 1))
    place = _ring_place(tl.load(slots + row), position, ring_rows)
    tl.store(out + row * COUNT + lanes, place, mask=lanes < COUNT)


@triton.jit(do_not_specialize=["num_pages", "count"])
def _visible(
    positions, slots, owners, pages, out, num_pages, count, RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    every = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    begin(EARLY)
    visible = tl.where(tl.load(slots + row) < 0, 0, (tl.load(positions + row) + 1) // RATIO)
    page = tl.load(pages + tl.load(owners + row) * num_pages + every // PAGE_ROWS, mask=every < visible, other=0)
    place = tl.where(every < visible, page * PAGE_ROWS + every % PAGE_ROWS, -1)
    tl.store(out + row * count + every, place, mask=every < count)


@triton.jit(do_not_specialize=["num_pages", "count"])
def _paged(
    rows, owners, pages, out, num_pages, count, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    known = tl.load(rows + row * count + lanes, mask=lanes < count, other=-1)
    page = tl.load(pages + tl.load(owners + row) * num_pages + known // PAGE_ROWS, mask=known >= 0, other=0)
    place = tl.where(known < 0, -1, page * PAGE_ROWS + known % PAGE_ROWS)
    tl.store(out + row * count + lanes, place, mask=lanes < count)


@triton.jit(do_not_specialize=["ring_rows", "num_places", "num_pages"])
def _groups(
    positions, slots, owners, pages, first, kept, members, places, ring_rows, num_places, num_pages,
    RATIO: tl.constexpr, REACH: tl.constexpr, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    begin(EARLY)
    position, slot = tl.load(positions + row), tl.load(slots + row)
    is_last = ((position + 1) % RATIO == 0) & (slot >= 0)
    tl.store(first + row, position - position % RATIO)
    tl.store(kept + row, _ring_place(slot, position, ring_rows))
    back = lanes - (REACH - 1)
    inside = lanes < REACH
    nearby = row + back
    is_row = inside & (nearby >= 0) & (back <= 0)
    is_own = is_row & (tl.load(slots + nearby, mask=is_row, other=-1) == slot)
    is_own = is_own & (tl.load(positions + nearby, mask=is_row, other=-1) == position + back)
    place = _ring_place(slot, position + back, ring_rows)
    place = tl.where(is_own & (place >= 0), num_places + nearby, place)
    tl.store(members + row * REACH + lanes, tl.where(is_last, place, -1), mask=inside)
    group = position // RATIO
    page = tl.load(pages + tl.load(owners + row) * num_pages + group // PAGE_ROWS, mask=is_last, other=0)
    tl.store(places + row, tl.where(is_last, page * PAGE_ROWS + group % PAGE_ROWS, -1))


def window_places(slots: Tensor, last: Tensor, count: int, ring_rows: int) -> Tensor:
    """See `dspark.ops.places.window_places`."""
    out = slots.new_empty(slots.shape[0], count)
    if slots.shape[0]:
        early = early_launch()
        _window[(slots.shape[0],)](
            packed(slots), packed(last), out, ring_rows, count, block_of(count), early, num_warps=4, launch_pdl=early
        )
    return out


def visible_places(rows: RowPlaces, ratio: int, page_rows: int, count: int) -> Tensor:
    """See `dspark.ops.places.visible_places`."""
    num_rows = rows.positions.shape[0]
    out = rows.positions.new_empty(num_rows, count)
    if num_rows:
        early = early_launch()
        _visible[(num_rows, triton.cdiv(count, _BLOCK))](
            packed(rows.positions), packed(rows.slots), packed(rows.owners), packed(rows.pages), out,
            rows.pages.shape[1], count, ratio, page_rows, _BLOCK, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out


def page_places(rows: Tensor, owners: Tensor, pages: Tensor, page_rows: int) -> Tensor:
    """See `dspark.ops.places.page_places`."""
    num_rows, count = rows.shape
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if out.numel():
        early = early_launch()
        _paged[(num_rows, triton.cdiv(count, _BLOCK))](
            packed(rows), packed(owners), packed(pages), out, pages.shape[1], count, page_rows, _BLOCK, early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out


def group_places(
    rows: RowPlaces, ratio: int, reach: int, ring_rows: int, num_places: int, page_rows: int
) -> GroupPlaces:
    """See `dspark.ops.places.group_places`."""
    num_rows = rows.positions.shape[0]
    first, kept, places = (rows.positions.new_empty(num_rows) for _ in range(3))
    members = rows.positions.new_empty(num_rows, reach)
    if num_rows:
        early = early_launch()
        _groups[(num_rows,)](
            packed(rows.positions), packed(rows.slots), packed(rows.owners), packed(rows.pages), first, kept, members,
            places, ring_rows, num_places, rows.pages.shape[1], ratio, reach, page_rows, block_of(reach), early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return GroupPlaces(first, kept, members, places)
