"""Views for passes of a fixed shape: everything that names a request arrives in tensors, so a graph can be captured.

They serve short spans only (at most `max_query_len` rows of a request). Then a ring holds the pass's rows and all that
those rows reach at the same time, so rows are written first and every window is read in place.
"""

from torch import Tensor

from dspark.ops.attention import KEY_CHUNK, Sources
from dspark.ops.compress import GroupRows
from dspark.ops.index import SCORE_CHUNK, IndexKeys
from dspark.ops.opset import OpSet
from dspark.ops.places import PlaceJob, PlaceJobs, RingRows, RowPlaces
from dspark.ops.rounds import BlockRows
from dspark.state.model_state import ModelState, tail_key


class RowView:
    """The target's view: `StateView` over rows of a fixed number.

    Args:
        places: where the rows belong.
        capacity: positions that a request may have; indices over compressed rows are that long.
        jobs: see `place_jobs`.
        ops: of the model, for index arithmetic.
    """

    def __init__(self, state: ModelState, places: RowPlaces, capacity: int, jobs: PlaceJobs, ops: OpSet) -> None:
        self.state = state
        self.places = places
        self.capacity = capacity
        self.positions = places.positions
        self._ops = ops
        self._index = dict(zip(jobs.jobs, ops.pass_places(places, jobs), strict=True))
        self._visible = {job.ratio: index.visible for job, index in self._index.items() if job.ratio}
        # Layers ask for the same few indices over all compressed rows again and again.
        self._visible_places: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """See `StateView.window_keys`; the rows lie in their ring already, see `ring_homes`."""
        ring = self.state.rings[key]
        assert rows.data_ptr() == ring.data_ptr(), "window rows that went nowhere"
        return [(ring.view(-1, ring.shape[2]), self._index[_window_job(self.state, key)].members)]

    def groups(self, key: str, ratio: int, reach: int) -> GroupRows:
        """See `StateView.groups`: one group a row; what a row gives that completes none is not kept."""
        ring = self.state.rings.get(tail_key(key))
        tail = None if ring is None else ring.view(-1, ring.shape[2])
        index, store = self._index[_group_job(self.state, key, ratio, reach)], self.state.appends[key]
        return GroupRows(
            index.first, self.positions, store, index.places, tail, index.kept, index.members, at_once=True
        )

    def appended(self, key: str) -> Tensor:
        """See `StateView.appended`."""
        return self.state.appends[key]

    def visible(self, ratio: int) -> Tensor:
        """See `StateView.visible`; a row of padding sees nothing."""
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
            count = max(self.capacity // ratio, 1)
            size = -(-count // SCORE_CHUNK) * SCORE_CHUNK
            page_rows = self.state.page_tokens // ratio
            self._keys[ratio] = self._ops.request_places(self.places.pages, page_rows, count, size)
        return IndexKeys(self.state.appends[key], self._keys[ratio], self.places.owners)


def ring_homes(state: ModelState, slots: Tensor, positions: Tensor) -> dict[str, RingRows]:
    """Where the window rows of a short pass go at once, by key; see the module."""
    return {key: RingRows(state.rings[key], slots, positions) for key in state.window_reach}


def place_jobs(state: ModelState) -> PlaceJobs:
    """All indices that layers ask a `RowView` for."""
    reaches = {tail.key: tail.reach for tail in state.geometry.tails}
    groups = [
        _group_job(state, store.key, store.ratio, reaches.get(store.key, store.ratio))
        for store in state.geometry.appends
    ]
    return PlaceJobs([*(_window_job(state, key) for key in state.window_reach), *groups], state.device)


def _window_job(state: ModelState, key: str) -> PlaceJob:
    return PlaceJob(0, state.window_reach[key], state.rings[key].shape[1])


def _group_job(state: ModelState, key: str, ratio: int, reach: int) -> PlaceJob:
    ring = state.rings.get(tail_key(key))
    ring_rows, num_places = (1, 0) if ring is None else (ring.shape[1], ring.shape[0] * ring.shape[1])
    return PlaceJob(ratio, reach, ring_rows, num_places, state.page_tokens // ratio)


class BlockRowView:
    """The draft's view over blocks of a fixed number, in the order of `DraftView`: the context, then the own block."""

    def __init__(self, state: ModelState, rows: BlockRows) -> None:
        self.state = state
        self.rows = rows
        self.positions = rows.positions

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """See `DraftView.window_keys`."""
        ring = self.state.rings[key]
        return [(ring.view(-1, ring.shape[2]), self.rows.window), (rows.to(ring.dtype), self.rows.own)]
