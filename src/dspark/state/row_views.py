"""Views for passes of a fixed shape: everything that names a request arrives in tensors, so a graph can be captured.

They serve short spans only (at most `max_query_len` rows of a request). Then a ring holds the pass's rows and all that
those rows reach at the same time, so rows are written first and every window is read in place.
"""

import torch
from torch import Tensor

from dspark.ops.attention import KEY_CHUNK, Sources
from dspark.ops.compress import GroupRows
from dspark.ops.index import SCORE_CHUNK, IndexKeys
from dspark.ops.opset import OpSet
from dspark.ops.places import GroupPlaces, RowPlaces
from dspark.state.model_state import ModelState, tail_key


class RowView:
    """The target's view: `StateView` over rows of a fixed number.

    Args:
        places: where the rows belong.
        capacity: positions that a request may have; indices over compressed rows are that long.
        ops: of the model, for index arithmetic and writes.
    """

    def __init__(self, state: ModelState, places: RowPlaces, capacity: int, ops: OpSet) -> None:
        self.state = state
        self.places = places
        self.capacity = capacity
        self.positions = places.positions
        self._ops = ops
        # Layers ask for the same few indices again and again: by ring rows, by reach or window, by ratio.
        self._windows: dict[tuple[int, int], Tensor] = {}
        self._groups: dict[tuple[int, int, int], GroupPlaces] = {}
        self._visible: dict[int, Tensor] = {}
        self._visible_places: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """See `StateView.window_keys`."""
        ring = self.state.rings[key]
        flat = ring.view(-1, ring.shape[2])
        self._ops.write_rows(flat, self._window(1, ring.shape[1]).flatten(), rows)
        return [(flat, self._window(self.state.window_reach[key], ring.shape[1]))]

    def _window(self, count: int, ring_rows: int) -> Tensor:
        """[T, count] ring places of the tokens up to each row's."""
        memo = count, ring_rows
        if memo not in self._windows:
            self._windows[memo] = self._ops.window_places(self.places.slots, self.positions, count, ring_rows)
        return self._windows[memo]

    def groups(self, key: str, ratio: int, reach: int) -> GroupRows:
        """See `StateView.groups`: one group a row; what a row gives that completes none is not kept."""
        ring = self.state.rings.get(tail_key(key))
        tail = None if ring is None else ring.view(-1, ring.shape[2])
        ring_rows, num_places = (0, 0) if ring is None else (ring.shape[1], ring.shape[0] * ring.shape[1])
        memo = ratio, reach, ring_rows
        if memo not in self._groups:
            page_rows = self.state.page_tokens // ratio
            self._groups[memo] = self._ops.group_places(
                self.places, ratio, reach, max(ring_rows, 1), num_places, page_rows
            )
        index = self._groups[memo]
        return GroupRows(
            index.first,
            self.positions,
            self.state.appends[key],
            index.places,
            tail,
            index.kept,
            index.members,
            at_once=True,
        )

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

    def visible_places(self, ratio: int) -> Tensor:
        """See `StateView.visible_places`; in whole key chunks."""
        if ratio not in self._visible_places:
            count = -(-max(self.max_visible(ratio), 1) // KEY_CHUNK) * KEY_CHUNK
            page_rows = self.state.page_tokens // ratio
            self._visible_places[ratio] = self._ops.visible_places(self.places, ratio, page_rows, count)
        return self._visible_places[ratio]

    def addresses(self, ratio: int, rows: Tensor) -> Tensor:
        """See `StateView.addresses`."""
        page_rows = self.state.page_tokens // ratio
        return self._ops.page_places(rows, self.places.owners, self.places.pages, page_rows)

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
        ops: of the model, for index arithmetic.
    """

    def __init__(self, state: ModelState, starts: Tensor, slots: Tensor, block_size: int, ops: OpSet) -> None:
        self.state = state
        self.starts = starts
        self.slots = slots
        self.block_size = block_size
        self.positions = (starts.unsqueeze(-1) + torch.arange(block_size, device=state.device)).flatten()
        self._ops = ops
        self._own = block_rows(starts.shape[0], block_size, state.device)
        self._windows: dict[tuple[int, int], Tensor] = {}

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """See `DraftView.window_keys`."""
        ring = self.state.rings[key]
        memo = (self.state.window_reach[key], ring.shape[1])
        if memo not in self._windows:
            slots, last = (part.repeat_interleave(self.block_size) for part in (self.slots, self.starts - 1))
            self._windows[memo] = self._ops.window_places(slots, last, *memo)
        return [(ring.view(-1, ring.shape[2]), self._windows[memo]), (rows.to(ring.dtype), self._own)]


def block_rows(num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """[R * G, G]: the rows of its own block for every row of R blocks."""
    own = torch.arange(num_blocks * block_size, device=device).view(num_blocks, block_size)
    return own.repeat_interleave(block_size, dim=0)
