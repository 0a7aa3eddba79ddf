"""Storage of every request's state, and the life of a request in it: open, grow, commit, fork, image, close.

A row is addressed by the absolute position of the token that wrote it, so commit is one integer and a rejected
row needs no undoing: it lies beyond `committed`, nothing reads it, and the next pass at that position overwrites it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.config.errors import ConfigError, DSparkError
from dspark.layers.plans import ModelPlan
from dspark.state.geometry import RingPlan, StateGeometry, require_ring_rows, ring_rows, state_geometry
from dspark.state.pages import PageAllocator


@dataclass(eq=False)
class RequestState:
    """A request's place in the stores; each is only itself.

    Positions below `committed` are final; `tentative` rows follow them. `ahead` counts the rows that rounds which the
    host has launched and not read may write after them. `restored` is the position of the image that it came from: its
    rings hold what that position needs, and nothing older.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    tentative: int = 0
    ahead: int = 0
    restored: int = 0

    def require_settled(self, action: str) -> None:
        """Refuse an action that must not see tentative rows, or that must know where the request stands."""
        if self.tentative or self.ahead:
            count = self.tentative or self.ahead
            raise AssertionError(f"{action} with {count} tentative rows after position {self.committed}")


@dataclass(eq=False)
class StateImage:
    """A request's state at position `committed`; each is only itself.

    Attributes:
        rings: of each ring the rows before `committed` that a later pass can read, oldest first.
        pages: shared; the last may be filled in part.
    """

    committed: int
    rings: dict[str, Tensor]
    pages: list[int]

    @property
    def ring_bytes(self) -> int:
        """Memory of the saved ring rows."""
        return sum(rows.numel() * rows.element_size() for rows in self.rings.values())


class ModelState:
    """All stores of one model on one device.

    Args:
        plan: gives the stores.
        num_slots: requests that can hold ring state at once.
        num_pages: pages of growing rows, shared by all requests.
        max_query_len: longest span that may stay tentative, 1 + num_speculative_tokens.
        dtype: of window rows and compressed rows; the inputs of open groups are always float32.
        num_ring_rows: physical rows of each window ring; the least that is safe by default.
        index_dtype: of index keys; `dtype` by default.
        max_rewind: how many rows before the committed position an image may still be taken.
        max_ahead: rows that rounds which run ahead of the host may write besides the tentative ones.
    """

    def __init__(
        self,
        plan: ModelPlan,
        num_slots: int,
        num_pages: int,
        max_query_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_ring_rows: int | None = None,
        index_dtype: torch.dtype | None = None,
        max_rewind: int = 0,
        max_ahead: int = 0,
    ) -> None:
        self.geometry: StateGeometry = state_geometry(plan)
        self.max_query_len = max_query_len
        self.max_rewind = max_rewind
        self.max_ahead = max_ahead
        self.page_tokens = self.geometry.page_tokens
        self.pages = PageAllocator(num_pages)
        self.requests: list[RequestState] = []
        self.images: list[StateImage] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.num_slots = num_slots
        self.rings: dict[str, Tensor] = {}
        self._reach: dict[str, int] = {}
        for ring in self.geometry.windows:
            self._add_ring(ring, ring.key, num_slots, num_ring_rows, dtype, device)
        for ring in self.geometry.tails:
            self._add_ring(ring, tail_key(ring.key), num_slots, None, torch.float32, device)
        self.appends: dict[str, Tensor] = {}
        for store in self.geometry.appends:
            num_rows = num_pages * self.page_tokens // store.ratio
            stored = (index_dtype or dtype) if store.holds_index_keys else dtype
            self.appends[store.key] = torch.zeros(num_rows, store.width, dtype=stored, device=device)
        self.window_reach = {ring.key: ring.reach for ring in self.geometry.windows}
        self.max_context_rows = max(self.window_reach.values()) + max_rewind
        self.append_ratios = {store.key: store.ratio for store in self.geometry.appends}
        self.device = torch.device(device)

    def _add_ring(
        self,
        ring: RingPlan,
        key: str,
        num_slots: int,
        rows: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        longest = self.max_query_len + self.max_ahead
        rows = ring_rows(ring, longest, self.max_rewind) if rows is None else rows
        require_ring_rows(ring, rows, longest, self.max_rewind)
        self._reach[key] = ring.reach
        self.rings[key] = torch.zeros(num_slots, rows, ring.width, dtype=dtype, device=device)

    @staticmethod
    def page_tokens_of(plan: ModelPlan) -> int:
        """Tokens of one page of a model's growing rows."""
        return state_geometry(plan).page_tokens

    def open(self) -> RequestState:
        """A new request at position 0. Old rows of its slot stay where they are: no position reaches them."""
        if not self._free_slots:
            raise ConfigError(f"all {self.num_slots} slots are in use: raise max_num_seqs or run fewer requests")
        request = RequestState(self._free_slots.pop())
        self.requests.append(request)
        return request

    def close(self, request: RequestState) -> None:
        """Free the slot and the pages, whatever is tentative."""
        self.requests.remove(request)
        for page in request.pages:
            self.pages.release(page)
        request.pages.clear()
        self._free_slots.append(request.slot)

    def pages_needed(self, request: RequestState, num_rows: int) -> int:
        """Pages that `reserve` would take."""
        last = request.committed + num_rows
        return max(0, -(-last // self.page_tokens) - len(request.pages))

    def reserve(self, request: RequestState, num_rows: int) -> None:
        """Make room for `num_rows` rows after the committed ones. Raises OutOfPagesError, holding nothing new then."""
        needed = self.pages_needed(request, num_rows)
        taken: list[int] = []
        try:
            for _ in range(needed):
                taken.append(self.pages.take())
        except DSparkError:
            for page in taken:
                self.pages.release(page)
            raise
        request.pages.extend(taken)

    def commit(self, request: RequestState, num_rows: int) -> None:
        """Make the first `num_rows` tentative rows final; the rest is forgotten. The only line where state moves."""
        if not 1 <= num_rows <= request.tentative:
            raise AssertionError(f"commit of {num_rows} rows with {request.tentative} tentative")
        request.committed += num_rows
        request.tentative = 0

    def image(self, request: RequestState, at: int | None = None) -> StateImage:
        """Save a request's state as it was at a position; its pages are shared, the rows of its rings copied.

        A ring still holds what the position needs, because rows are overwritten in the order of their positions and
        `max_rewind` rows more than a pass needs are kept. Rows at and after the position belong to nobody's past; so
        rounds that run ahead may be writing them, as long as the rings have room for `max_ahead` of them.

        Args:
            at: in committed - max_rewind .. committed and not before `restored`; the committed position by default.
        """
        if request.tentative:
            request.require_settled("an image")
        at = request.committed if at is None else at
        oldest = max(request.committed - self.max_rewind, request.restored)
        if not oldest <= at <= request.committed:
            raise AssertionError(f"an image at {at}, but the rings hold what {oldest} to {request.committed} need")
        used = -(-at // self.page_tokens)
        image = StateImage(
            at, self.saved_rings(request.slot, at), [self.pages.share(page) for page in request.pages[:used]]
        )
        self.images.append(image)
        return image

    def saved_rings(self, slot: int, at: int) -> dict[str, Tensor]:
        """Copies of the ring rows of a slot that a pass from a position can read."""
        return {key: ring[slot, self._ring_places(key, at)] for key, ring in self.rings.items()}

    def restore_rings(self, saved: dict[str, Tensor], slot: int, at: int) -> None:
        """Put what `saved_rings` returned into a slot."""
        for key, rows in saved.items():
            self.rings[key][slot, self._ring_places(key, at)] = rows

    def _ring_places(self, key: str, at: int) -> Tensor:
        """Places of the rows before a position that a pass from it can read; reach 3 at 10 in a ring of 8: 7, 0, 1."""
        return torch.arange(max(at - self._reach[key], 0), at, device=self.device) % self.rings[key].shape[1]

    def restore(self, image: StateImage) -> RequestState:
        """A new request that continues from an image.

        Whole pages are shared. A page that is filled in part is copied, because the request will write into it.
        Raises OutOfPagesError, holding nothing then.
        """
        request = self.open()
        try:
            for number, page in enumerate(image.pages):
                whole = (number + 1) * self.page_tokens <= image.committed
                request.pages.append(self.pages.share(page) if whole else self._copied(page))
        except DSparkError:
            self.close(request)
            raise
        self._fill(request.slot, image)
        request.committed = request.restored = image.committed
        return request

    def _fill(self, slot: int, image: StateImage) -> None:
        self.restore_rings(image.rings, slot, image.committed)

    def adopt_pages(self, image: StateImage, pages: list[int]) -> None:
        """Let an image share other pages in place of its first ones; they must hold the same rows."""
        for number, page in enumerate(pages):
            own, image.pages[number] = image.pages[number], self.pages.share(page)
            self.pages.release(own)

    def drop(self, image: StateImage) -> None:
        """Forget an image and release its pages."""
        self.images.remove(image)
        for page in image.pages:
            self.pages.release(page)

    def fork(self, request: RequestState) -> RequestState:
        """A second request with the same committed history."""
        image = self.image(request)
        try:
            return self.restore(image)
        finally:
            self.drop(image)

    def _copied(self, page: int) -> int:
        copy = self.pages.take()
        self.copy_page(page, copy)
        return copy

    def copy_page(self, source: int, target: int) -> None:
        """Copy the growing rows of a page onto those of another."""
        for key, rows in self.appends.items():
            count = self.page_tokens // self.append_ratios[key]
            rows[target * count : (target + 1) * count] = rows[source * count : (source + 1) * count]

    def check_integrity(self) -> None:
        """Assert that slots and pages are held exactly by the open requests and images."""
        slots = [request.slot for request in self.requests]
        assert len(set(slots)) == len(slots), f"a slot is used twice: {slots}"
        assert sorted(slots + self._free_slots) == list(range(self.num_slots)), "slots are lost or invented"
        held: dict[int, int] = {}
        for pages in [request.pages for request in self.requests] + [list(image.pages) for image in self.images]:
            for page in pages:
                held[page] = held.get(page, 0) + 1
        self.pages.check_integrity(held)


def tail_key(key: str) -> str:
    """Ring name of the open group's inputs of a growing store."""
    return f"{key}.tail"
