"""Index arithmetic of a pass: one program a row and block of places."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.places import GroupPlaces, PlaceJob, PlaceJobs, RowPlaces
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import block_of, packed

_BLOCK = 512
_JOB_WORDS = tl.constexpr(len(PlaceJob._fields) + 1)


@triton.jit
def ring_place(slot, position, ring_rows):
    """See `dspark.ops.places.ring_places`."""
    return tl.where((slot < 0) | (position < 0), -1, slot * ring_rows + position.to(tl.int32) % ring_rows)


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


@triton.jit(do_not_specialize=["num_pages", "count", "size"])
def _every(pages, out, num_pages, count, size, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    every = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    begin(EARLY)
    number = tl.minimum(every // PAGE_ROWS, num_pages - 1)
    page = tl.load(pages + request * num_pages + number, mask=every < count, other=0)
    place = tl.where(every < count, page * PAGE_ROWS + every % PAGE_ROWS, -1)
    tl.store(out + request * size + every, place, mask=every < size)


@triton.jit(do_not_specialize=["num_pages"])
def _pass(
    positions, slots, owners, pages, jobs, out, num_pages, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program a row and job; a job's columns [COLUMNS, T] lie before its members [T, reach]."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    job, lanes = jobs + tl.program_id(1) * _JOB_WORDS, tl.arange(0, BLOCK)
    begin(EARLY)
    ratio, reach, ring_rows = tl.load(job).to(tl.int32), tl.load(job + 1), tl.load(job + 2).to(tl.int32)
    start = tl.load(job + 5)
    position, slot = tl.load(positions + row).to(tl.int32), tl.load(slots + row)
    out += start * num_rows
    back = lanes - (reach - 1)
    inside = lanes < reach
    member = ring_place(slot, position + back, ring_rows)
    if ratio > 0:
        page_rows = tl.load(job + 4).to(tl.int32)
        is_last = ((position + 1) % ratio == 0) & (slot >= 0)
        group = position // ratio
        page = tl.load(pages + tl.load(owners + row) * num_pages + group // page_rows, mask=is_last, other=0)
        tl.store(out + row, group * ratio)
        tl.store(out + num_rows + row, ring_place(slot, position, ring_rows))
        tl.store(out + 2 * num_rows + row, tl.where(slot < 0, 0, (position + 1) // ratio))
        tl.store(out + 3 * num_rows + row, tl.where(is_last, page * page_rows + group % page_rows, -1))
        nearby = row + back
        is_row = inside & (nearby >= 0)
        is_own = is_row & (tl.load(slots + nearby, mask=is_row, other=-1) == slot)
        is_own = is_own & (tl.load(positions + nearby, mask=is_row, other=-1) == position + back)
        member = tl.where(is_own & (member >= 0), tl.load(job + 3) + nearby, member)
        member = tl.where(is_last, member, -1)
    tl.store(out + COLUMNS * num_rows + row * reach + lanes, member, mask=inside)


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


def request_places(pages: Tensor, page_rows: int, count: int, size: int) -> Tensor:
    """See `dspark.ops.places.request_places`."""
    out = pages.new_empty(pages.shape[0], size)
    early = early_launch()
    _every[(pages.shape[0], triton.cdiv(size, _BLOCK))](
        packed(pages), out, pages.shape[1], count, size, page_rows, _BLOCK, early, num_warps=4, launch_pdl=early
    )
    return out


def pass_places(rows: RowPlaces, jobs: PlaceJobs) -> list[GroupPlaces]:
    """See `dspark.ops.places.pass_places`."""
    num_rows, columns = rows.positions.shape[0], jobs.NUM_COLUMNS
    out = rows.positions.new_empty(num_rows * jobs.starts[-1])
    early = early_launch()
    _pass[(num_rows, len(jobs.jobs))](
        packed(rows.positions), packed(rows.slots), packed(rows.owners), packed(rows.pages), jobs.words, out,
        rows.pages.shape[1], columns, block_of(jobs.max_reach), early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    found = []
    for job, start in zip(jobs.jobs, jobs.starts, strict=False):
        own = out[start * num_rows : (start + columns + job.reach) * num_rows]
        parts = own[: columns * num_rows].view(columns, num_rows)
        found.append(GroupPlaces._make([*parts, own[columns * num_rows :].view(num_rows, job.reach)]))
    return found
