"""Views for passes of a fixed shape: everything that names a request arrives in tensors, so a graph can be captured.

They serve short spans only (at most `max_query_len` rows of a request). Then a ring holds the pass's rows and all that
those rows reach at the same time, so rows are written first and every window is read in place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.index import SCORE_CHUNK, IndexKeys
from dspark.state.model_state import ModelState, tail_key

WriteRows = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class RowPlaces:
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


def ring_places(slots: Tensor, positions: Tensor, ring_rows: int) -> Tensor:
    """Places in a flattened ring store of tokens; -1 for a negative slot or position.

    Example: with 133 rows a slot, position 200 of slot 2 is at 2 * 133 + 200 % 133 = 333.
    """
    return torch.where((slots < 0) | (positions < 0), -1, slots * ring_rows + positions % ring_rows)


class RowView:
    """The target's view: `StateView` over rows of a fixed number.

    Args:
        places: where the rows belong.
        capacity: positions that a request may have; indices over compressed rows are that long.
        write_rows: see `dspark.ops.rows.write_rows`.
    """

    def __init__(self, state: ModelState, places: RowPlaces, capacity: int, write_rows: WriteRows) -> None:
        self.state = state
        self.places = places
        self.capacity = capacity
        self.positions = places.positions
        self._write_rows = write_rows
        # Layers ask for the same few indices again and again: by ring rows, by reach or window, by ratio.
        self._writes: dict[int, Tensor] = {}
        self._windows: dict[tuple[int, int], Tensor] = {}
        self._groups: dict[tuple[int, int, int], Tensor] = {}
        self._appends: dict[int, Tensor] = {}
        self._visible: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}

    def _write_ring(self, ring: Tensor, rows: Tensor) -> Tensor:
        """Keep the pass's rows: the flattened ring [N, K] with them in it."""
        count = ring.shape[1]
        if count not in self._writes:
            self._writes[count] = ring_places(self.places.slots, self.positions, count)
        flat = ring.view(-1, ring.shape[2])
        self._write_rows(flat, self._writes[count], rows)
        return flat

    def window_keys(self, key: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `StateView.window_keys`."""
        ring = self.state.rings[key]
        memo = (self.state.window_reach[key], ring.shape[1])
        if memo not in self._windows:
            back = torch.arange(1 - memo[0], 1, device=self.state.device)
            self._windows[memo] = self._reached(back, ring.shape[1])
        return self._write_ring(ring, rows), self._windows[memo]

    def _reached(self, back: Tensor, ring_rows: int) -> Tensor:
        """Ring places [T, J] of the tokens at the rows' positions + back [J]."""
        return ring_places(self.places.slots.unsqueeze(-1), self.positions.unsqueeze(-1) + back, ring_rows)

    def _completes(self, ratio: int) -> Tensor:
        """[T] whether a row is the last of its group."""
        return ((self.positions + 1) % ratio == 0) & (self.places.slots >= 0)

    def group_positions(self, ratio: int) -> Tensor:
        """See `StateView.group_positions`: one group a row; what a row gives that completes none is not kept."""
        return self.positions - self.positions % ratio

    def group_inputs(self, key: str, rows: Tensor, ratio: int, reach: int) -> tuple[Tensor, Tensor]:
        """See `StateView.group_inputs`; for a row that completes no group none exists."""
        ring = self.state.rings[tail_key(key)]
        flat = self._write_ring(ring, rows)
        memo = (ratio, reach, ring.shape[1])
        if memo not in self._groups:
            back = torch.arange(1 - reach, 1, device=self.state.device)
            index = self._reached(back, ring.shape[1])
            self._groups[memo] = index.masked_fill_(~self._completes(ratio).unsqueeze(-1), -1)
        index = self._groups[memo]
        exists = index >= 0
        return flat[index.clamp(min=0)].masked_fill_(~exists.unsqueeze(-1), 0.0), exists

    def append(self, key: str, ratio: int, rows: Tensor) -> None:
        """See `StateView.append`."""
        if ratio not in self._appends:
            groups = (self.positions // ratio).masked_fill(~self._completes(ratio), -1)
            self._appends[ratio] = self.addresses(ratio, groups.unsqueeze(-1)).squeeze(-1)
        self._write_rows(self.state.appends[key], self._appends[ratio], rows)

    def appended(self, key: str) -> Tensor:
        """See `StateView.appended`."""
        return self.state.appends[key]

    def visible(self, ratio: int) -> Tensor:
        """See `StateView.visible`; a row of padding sees nothing."""
        if ratio not in self._visible:
            self._visible[ratio] = ((self.positions + 1) // ratio).masked_fill(self.places.slots < 0, 0)
        return self._visible[ratio]

    def max_visible(self, ratio: int) -> int:
        """See `StateView.max_visible`."""
        return self.capacity // ratio

    def addresses(self, ratio: int, rows: Tensor) -> Tensor:
        """See `StateView.addresses`."""
        per_page = self.state.page_tokens // ratio
        known = rows.clamp(min=0)
        pages = self.places.pages[self.places.owners.unsqueeze(-1), known // per_page]
        return torch.where(rows >= 0, pages * per_page + known % per_page, -1)

    def index_keys(self, key: str, ratio: int) -> IndexKeys:
        """See `StateView.index_keys`; keys that a request does not have yet have places all the same."""
        if ratio not in self._keys:
            per_page = self.state.page_tokens // ratio
            count = max(self.capacity // ratio, 1)
            every = torch.arange(-(-count // SCORE_CHUNK) * SCORE_CHUNK, device=self.state.device)
            pages = self.places.pages[:, (every // per_page).clamp_(max=self.places.pages.shape[1] - 1)]
            self._keys[ratio] = torch.where(every < count, pages * per_page + every % per_page, -1)
        return IndexKeys(self.state.appends[key], self._keys[ratio], self.places.owners)


class BlockRowView:
    """The draft's view over R blocks of G rows, in the order of `DraftView`: the context window, then the own block.

    Args:
        starts: [R] int64, the position of each block's first row. slots: [R] int64, -1 for padding.
    """

    def __init__(self, state: ModelState, starts: Tensor, slots: Tensor, block_size: int) -> None:
        self.state = state
        self.starts = starts
        self.slots = slots
        self.block_size = block_size
        self.positions = (starts.unsqueeze(-1) + torch.arange(block_size, device=state.device)).flatten()
        self._windows: dict[tuple[int, int], Tensor] = {}

    def window_keys(self, key: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftView.window_keys`."""
        ring = self.state.rings[key]
        memo = (self.state.window_reach[key], ring.shape[1])
        if memo not in self._windows:
            self._windows[memo] = self._block_index(*memo)
        kept = ring[self.slots.clamp(min=0)].flatten(0, 1)
        return torch.cat((kept, rows.to(ring.dtype))), self._windows[memo]

    def _block_index(self, window: int, ring_rows: int) -> Tensor:
        """[R * G, W + G]: places in [rings of the requests, rows of the blocks]."""
        num_requests = self.starts.shape[0]
        number = torch.arange(num_requests, device=self.state.device)
        back = torch.arange(-window, 0, device=self.state.device)
        kept = ring_places(
            number.masked_fill(self.slots < 0, -1).unsqueeze(-1), self.starts.unsqueeze(-1) + back, ring_rows
        )
        own = torch.arange(num_requests * self.block_size, device=self.state.device).view(num_requests, -1)
        index = torch.cat((kept, own + num_requests * ring_rows), dim=1)
        return index.repeat_interleave(self.block_size, dim=0)
