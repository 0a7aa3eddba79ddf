"""Where the rows of a pass, their windows and their groups lie in the stores, from what a fixed shape knows of them."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.rows import write_rows


class RowPlaces(NamedTuple):
    """Where the T rows of a pass belong; a row of padding has slot -1, reads nothing and writes nothing.

    Attributes:
        positions, slots: [T] int64.
        owners: [T] int64, the row's request as a row of `pages`; a request's rows lie together.
        pages: [R, P] int64, pages of the requests; what stands behind a request's own pages is not read.
    """

    positions: Tensor
    slots: Tensor
    owners: Tensor
    pages: Tensor


class GroupPlaces(NamedTuple):
    """Compression groups, one a row of the pass: first positions, and places as in `dspark.ops.compress.GroupRows`.

    visible: [T] int64, groups that are complete up to each row; 0 for a row of padding.
    """

    first: Tensor
    kept: Tensor
    visible: Tensor
    places: Tensor
    members: Tensor


class PlaceJob(NamedTuple):
    """What layers read of a pass of a fixed shape: `group_places`, or `window_places` of all rows at `ring_rows`.

    Attributes:
        ratio, reach: tokens and members of a group; of a window ratio is 0 and reach its tokens.
        ring_rows, num_places, page_rows: see `group_places`; a window has only ring_rows.
    """

    ratio: int
    reach: int
    ring_rows: int
    num_places: int = 0
    page_rows: int = 0


class PlaceJobs:
    """Different jobs, for one launch, whose results lie one behind the other.

    Example: 2 rows, a window of 3, then groups with 8 members: columns of the window at 0..7, which are not used, its
    places at 8..13, columns of the groups at 14..21, and their members at 22..37.

    Attributes:
        jobs: in order.
        words: [J, 6] int64 on the device: the five numbers of each job, and what a row has in the jobs before it.
    """

    NUM_COLUMNS = 4  # of `GroupPlaces` besides the members

    def __init__(self, jobs: Iterable[PlaceJob], device: torch.device) -> None:
        self.jobs = tuple(dict.fromkeys(jobs))
        sizes = [self.NUM_COLUMNS + job.reach for job in self.jobs]
        self.starts = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.max_reach = max(job.reach for job in self.jobs)
        words = [[*job, start] for job, start in zip(self.jobs, self.starts, strict=False)]
        self.words = torch.tensor(words, dtype=torch.int64, device=device)


class RingRows(NamedTuple):
    """Where the T rows of a pass go in a ring as soon as they are known; no place occurs twice.

    Attributes:
        ring: [S, N, K], changed.
        slots, positions: [T] int64; a row of slot -1 goes nowhere.
    """

    ring: Tensor
    slots: Tensor
    positions: Tensor

    def write(self, rows: Tensor) -> None:
        """Put rows [T, K] there."""
        places = ring_places(self.slots, self.positions, self.ring.shape[1])
        write_rows(self.ring.view(-1, self.ring.shape[2]), places, rows)


def ring_places(slots: Tensor, positions: Tensor, ring_rows: int) -> Tensor:
    """Places in a flattened ring store of tokens; -1 for a negative slot or position.

    Example: with 133 rows a slot, position 200 of slot 2 is at 2 * 133 + 200 % 133 = 333.
    """
    return torch.where((slots < 0) | (positions < 0), -1, slots * ring_rows + positions % ring_rows)


def window_places(slots: Tensor, last: Tensor, count: int, ring_rows: int) -> Tensor:
    """Ring places [T, count] of the tokens up to the positions `last` [T] of the slots [T], oldest first; -1 none."""
    back = torch.arange(1 - count, 1, device=slots.device)
    return ring_places(slots.unsqueeze(-1), last.unsqueeze(-1) + back, ring_rows)


def page_places(rows: Tensor, owners: Tensor, pages: Tensor, page_rows: int) -> Tensor:
    """Places [T, J] in a growing store of the rows [T, J] of each query's request; -1 stays -1.

    Args:
        owners, pages: see `RowPlaces`. page_rows: rows of a page.
    """
    known = rows.clamp(min=0)
    numbers = (known // page_rows).clamp_(max=pages.shape[1] - 1)
    return torch.where(rows >= 0, pages[owners.unsqueeze(-1), numbers] * page_rows + known % page_rows, -1)


def num_visible(rows: RowPlaces, ratio: int) -> Tensor:
    """Compressed rows [T] that each row sees; a row of padding sees none."""
    return ((rows.positions + 1) // ratio).masked_fill(rows.slots < 0, 0)


def visible_places(rows: RowPlaces, ratio: int, page_rows: int, count: int) -> Tensor:
    """Places [T, count] of the compressed rows that each row sees, in order, then -1; a row of padding sees none.

    Args:
        page_rows: compressed rows of a page. count: of places; rows beyond it are left out.
    """
    every = torch.arange(count, device=rows.positions.device)
    is_seen = every < num_visible(rows, ratio).unsqueeze(-1)
    return page_places(torch.where(is_seen, every, -1), rows.owners, rows.pages, page_rows)


def group_places(
    rows: RowPlaces, ratio: int, reach: int, ring_rows: int, num_places: int, page_rows: int
) -> GroupPlaces:
    """Places of the groups of `ratio` tokens that rows complete, one a row, -1 where a row completes none.

    Args:
        reach: members of a group. ring_rows, num_places: rows of a slot of the tail ring and of the whole ring.
        page_rows: compressed rows of a page.
    """
    positions, slots = rows.positions, rows.slots
    is_last = ((positions + 1) % ratio == 0) & (slots >= 0)
    members = window_places(slots, positions, reach, ring_rows).masked_fill(~is_last.unsqueeze(-1), -1)
    number = torch.arange(positions.shape[0], device=positions.device)
    back = torch.arange(1 - reach, 1, device=positions.device)
    own = number.unsqueeze(-1) + back
    nearby = own.clamp(min=0)
    is_own = (own >= 0) & (slots[nearby] == slots.unsqueeze(-1)) & (positions[nearby] == positions.unsqueeze(-1) + back)
    members = torch.where(is_own & (members >= 0), num_places + own, members)
    group = (positions // ratio).masked_fill(~is_last, 0)
    pages = rows.pages[rows.owners, group // page_rows]
    places = torch.where(is_last, pages * page_rows + group % page_rows, -1)
    kept = ring_places(slots, positions, ring_rows)
    return GroupPlaces(positions - positions % ratio, kept, num_visible(rows, ratio), places, members)


def pass_places(rows: RowPlaces, jobs: PlaceJobs) -> list[GroupPlaces]:
    """All indices of a pass; those of windows are `members`, and their other parts mean nothing."""
    found = []
    for job in jobs.jobs:
        if job.ratio:
            found.append(group_places(rows, *job))
        else:
            window = window_places(rows.slots, rows.positions, job.reach, job.ring_rows)
            found.append(GroupPlaces._make([rows.slots] * jobs.NUM_COLUMNS + [window]))
    return found


def request_places(pages: Tensor, page_rows: int, count: int, size: int) -> Tensor:
    """Places [R, size] of the first `count` compressed rows of every request, then -1; see `RowPlaces`."""
    every = torch.arange(size, device=pages.device)
    known = pages[:, (every // page_rows).clamp_(max=pages.shape[1] - 1)] * page_rows + every % page_rows
    return torch.where(every < count, known, -1)
