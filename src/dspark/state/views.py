"""Views of the state for one pass: of the target (reads and tentative writes) and of the draft (reads only)."""

import torch
from torch import Tensor

from dspark.ops.attention import KEY_CHUNK, Sources
from dspark.ops.compress import GroupRows
from dspark.ops.index import SCORE_CHUNK, IndexKeys
from dspark.ops.places import page_places
from dspark.ops.rounds import block_rows
from dspark.state.model_state import ModelState, tail_key
from dspark.state.spans import RowMap, Span, page_table


def open_pass(state: ModelState, spans: list[Span]) -> None:
    """Make room for the rows of a pass and mark them tentative."""
    for span in spans:
        span.request.require_settled("a new pass")
        assert span.start == span.request.committed, "a pass starts at the committed position"
        state.reserve(span.request, span.num_rows)
    for span in spans:
        span.request.tentative = span.num_rows


class PassView:
    """The target's view: `StateView` over the spans of a pass. Creating it marks the rows tentative."""

    def __init__(self, state: ModelState, spans: list[Span], num_padding: int = 0) -> None:
        open_pass(state, spans)
        self.state = state
        self.rows = RowMap(spans, num_padding, state.device)
        self.positions = self.rows.positions
        self._writes: dict[int, tuple[Tensor, Tensor]] = {}
        self._windows: dict[tuple[int, int], Tensor] = {}
        self._groups: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._group_members: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._visible: dict[int, Tensor] = {}
        self._visible_places: dict[int, Tensor] = {}
        self._key_places: dict[int, Tensor] = {}
        self._page_table = torch.tensor(
            page_table([span.request.pages for span in spans]), dtype=torch.int64, device=state.device
        )

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """See `StateView.window_keys`."""
        ring = self.state.rings[key]
        joined = self._write_ring(ring, rows)
        return [(joined, self._window_index(self.state.window_reach[key], ring.shape[1]))]

    def _write_ring(self, ring: Tensor, rows: Tensor) -> Tensor:
        """Ring rows of the pass's requests, then the pass's own: [N, K]; afterwards the ring keeps the own ones."""
        joined = torch.cat((ring[self.rows.slots].flatten(0, 1), rows.to(ring.dtype)))
        kept, places = self._ring_writes(ring.shape[1])
        ring.view(-1, ring.shape[2])[places] = rows[kept].to(ring.dtype)
        return joined

    def _ring_writes(self, ring_rows: int) -> tuple[Tensor, Tensor]:
        if ring_rows not in self._writes:
            self._writes[ring_rows] = self.rows.ring_writes(ring_rows)
        return self._writes[ring_rows]

    def _window_index(self, window: int, ring_rows: int) -> Tensor:
        """[T, W] places of each query's window in the joined rows, oldest first."""
        memo = (window, ring_rows)
        if memo not in self._windows:
            back = torch.arange(1 - window, 1, device=self.state.device)
            positions = self.positions.unsqueeze(-1) + back
            owners = self.rows.owners.unsqueeze(-1).expand_as(positions)
            index = self.rows.locate(owners, positions, ring_rows)
            self._windows[memo] = index.masked_fill_(self.rows.is_padding.unsqueeze(-1), -1)
        return self._windows[memo]

    def _completed(self, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
        """Owners, first positions and store places of the groups that this pass completes, each [C]."""
        if ratio not in self._groups:
            owners, first, places = [], [], []
            per_page = self.state.page_tokens // ratio
            for number, span in enumerate(self.rows.spans):
                for group in range(span.start // ratio, span.stop // ratio):
                    owners.append(number)
                    first.append(group * ratio)
                    places.append(span.request.pages[group // per_page] * per_page + group % per_page)
            tensors = [
                torch.tensor(part, dtype=torch.int64, device=self.state.device) for part in (owners, first, places)
            ]
            self._groups[ratio] = (tensors[0], tensors[1], tensors[2])
        return self._groups[ratio]

    def groups(self, key: str, ratio: int, reach: int) -> GroupRows:
        """See `StateView.groups`."""
        owners, first, places = self._completed(ratio)
        ring = self.state.rings.get(tail_key(key))
        if ring is None:
            tail, kept, members = None, places[:0], places[:0]
        else:
            tail = ring.view(-1, ring.shape[2])
            kept, members = self._group_places(owners, first, ratio, reach, ring)
        store = self.state.appends[key]
        return GroupRows(first, self.positions, store, places, tail, kept, members, at_once=False)

    def _group_places(
        self, owners: Tensor, first: Tensor, ratio: int, reach: int, ring: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Places [T] of the pass's rows in a flattened tail ring, and those [C, reach] of the groups' members."""
        memo = ratio, reach, ring.shape[1]
        if memo not in self._group_members:
            written, places = self._ring_writes(ring.shape[1])
            kept = torch.full_like(self.positions, -1).index_copy_(0, written, places)
            positions = first.unsqueeze(-1) + torch.arange(ratio - reach, ratio, device=self.state.device)
            owners = owners.unsqueeze(-1).expand_as(positions)
            members = self.rows.locate(owners, positions, ring.shape[1], num_slots=ring.shape[0])
            self._group_members[memo] = kept, members
        return self._group_members[memo]

    def appended(self, key: str) -> Tensor:
        """See `StateView.appended`."""
        return self.state.appends[key]

    def visible(self, ratio: int) -> Tensor:
        """See `StateView.visible`; a padding row sees nothing."""
        if ratio not in self._visible:
            counts = (self.positions + 1) // ratio
            self._visible[ratio] = counts.masked_fill(self.rows.is_padding, 0)
        return self._visible[ratio]

    def max_visible(self, ratio: int) -> int:
        """See `StateView.max_visible`."""
        return max(span.stop // ratio for span in self.rows.spans)

    def visible_places(self, ratio: int) -> Tensor:
        """See `StateView.visible_places`; in whole key chunks."""
        if ratio not in self._visible_places:
            count = -(-max(self.max_visible(ratio), 1) // KEY_CHUNK) * KEY_CHUNK
            every = torch.arange(count, device=self.state.device).expand(self.positions.shape[0], -1)
            seen = torch.where(every < self.visible(ratio).unsqueeze(-1), every, -1)
            self._visible_places[ratio] = self.addresses(ratio, seen)
        return self._visible_places[ratio]

    def addresses(self, ratio: int, rows: Tensor) -> Tensor:
        """See `StateView.addresses`."""
        return page_places(rows, self.rows.owners, self._page_table, self.state.page_tokens // ratio)

    def index_keys(self, key: str, ratio: int) -> IndexKeys:
        """See `StateView.index_keys`."""
        if ratio not in self._key_places:
            per_page = self.state.page_tokens // ratio
            length = -(-max(self.max_visible(ratio), 1) // SCORE_CHUNK) * SCORE_CHUNK
            every = torch.arange(length, device=self.state.device)
            pages = self._page_table[:, (every // per_page).clamp_(max=self._page_table.shape[1] - 1)]
            counts = torch.tensor([span.stop // ratio for span in self.rows.spans], device=self.state.device)
            known = every < counts.unsqueeze(-1)
            self._key_places[ratio] = torch.where(known, pages * per_page + every % per_page, -1)
        return IndexKeys(self.state.appends[key], self._key_places[ratio], self.rows.owners)


class DraftView:
    """The draft's view: blocks that follow each request's committed rows and see its window and themselves."""

    def __init__(self, state: ModelState, spans: list[Span]) -> None:
        for span in spans:
            span.request.require_settled("a draft pass")
        self.state = state
        self.rows = RowMap(spans, 0, state.device)
        self.positions = self.rows.positions
        self._own = block_rows(len(spans), spans[0].num_rows, state.device)
        self._windows: dict[tuple[int, int], Tensor] = {}

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """Context window and own block for every query of a block; nothing is kept."""
        ring = self.state.rings[key]
        memo = (self.state.window_reach[key], ring.shape[1])
        if memo not in self._windows:
            self._windows[memo] = self._context_index(*memo)
        return [(ring[self.rows.slots].flatten(0, 1), self._windows[memo]), (rows.to(ring.dtype), self._own)]

    def _context_index(self, window: int, ring_rows: int) -> Tensor:
        """[N, W] places of the window that ends at the last committed position."""
        back = torch.arange(-window, 0, device=self.state.device)
        positions = self.rows.starts[self.rows.owners].unsqueeze(-1) + back
        return self.rows.locate(self.rows.owners.unsqueeze(-1).expand_as(positions), positions, ring_rows)


def keep_context(state: ModelState, spans: list[Span], rows_by_key: list[tuple[str, Tensor]]) -> None:
    """Write draft window rows of committed tokens.

    Args:
        spans: committed rows of each request.
        rows_by_key: (store key, rows [N, K]) in the order of the spans' rows.
    """
    rows = RowMap(spans, 0, state.device)
    writes: dict[int, tuple[Tensor, Tensor]] = {}
    for key, values in rows_by_key:
        ring = state.rings[key]
        ring_rows = ring.shape[1]
        if ring_rows not in writes:
            writes[ring_rows] = rows.ring_writes(ring_rows)
        kept, places = writes[ring_rows]
        ring.view(-1, ring.shape[2])[places] = values[kept].to(ring.dtype)
