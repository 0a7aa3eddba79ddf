"""Continuous batching: who runs, who waits, who must stop, and how a step's rows are shared out. Integers only.

Order of precedence is (priority, arrival): the first of them is never stopped, and any admitted request fits alone, so
every request ends. Decoding requests come before prefill in a step; prefill takes the rows that are left.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dspark.config.errors import ConfigError
from dspark.scheduler.plan import PlannedSpan, RequestId, RequestNeeds, StepPlan

NeedsOf = Callable[[RequestId], RequestNeeds]


class PageSupply(Protocol):
    """Where the pages are: what the scheduler asks of the state."""

    def available_pages(self, wanted: int) -> int:
        """Pages that can be had, counted no further than `wanted`: free ones, and those that only a cache holds."""
        ...

    def pages_to_start(self, request_id: RequestId) -> int:
        """Pages that a waiting request takes for its known tokens, less those that it shares with running ones."""
        ...

    def pages_from(self, request_id: RequestId) -> int:
        """Pages that stopping a running request makes available."""
        ...


class Place(NamedTuple):
    """A request's place in the order of precedence; the lowest comes first."""

    priority: int
    arrival: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step: requests that lose their state first, then the pass."""

    preempted: tuple[RequestId, ...]
    plan: StepPlan


class Scheduler:
    """Admits, plans and stops requests.

    Args:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows of a step.
        num_pages, page_tokens: capacity of the growing rows.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, num_pages: int, page_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_rows = max_num_batched_tokens
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._places: dict[RequestId, Place] = {}
        self._waiting: list[tuple[Place, RequestId]] = []
        self._running: list[tuple[Place, RequestId]] = []

    @property
    def running(self) -> tuple[RequestId, ...]:
        """Requests with state, in order of precedence."""
        return tuple(request_id for _, request_id in self._running)

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Requests without state, in order of precedence."""
        return tuple(request_id for _, request_id in self._waiting)

    def require_fit(self, max_len: int) -> None:
        """Refuse what could never run. Raises ConfigError."""
        needed = -(-max_len // self.page_tokens)
        if needed > self.num_pages:
            raise ConfigError(
                f"a request of up to {max_len} tokens needs {needed} pages and the engine has {self.num_pages}: lower "
                "max_tokens, shorten the prompt or raise max_num_pages"
            )

    def add(self, request_id: RequestId, place: Place) -> None:
        """Queue a request that fits."""
        self._places[request_id] = place
        insort(self._waiting, (place, request_id))

    def remove(self, request_id: RequestId) -> None:
        """Forget a request, running or waiting; unknown ids are fine."""
        place = self._places.pop(request_id, None)
        if place is None:
            return
        for queue in (self._running, self._waiting):
            if (place, request_id) in queue:
                queue.remove((place, request_id))

    def preempt(self, request_id: RequestId) -> None:
        """Move a running request back to its place among the waiting ones."""
        entry = (self._places[request_id], request_id)
        self._running.remove(entry)
        insort(self._waiting, entry)

    def next_to_start(self, needs_of: NeedsOf, supply: PageSupply) -> RequestId | None:
        """Admit the first waiting request if a slot and pages for all its known tokens are there.

        What running requests still need for their own known tokens is theirs, and each keeps a page to grow into, so
        that an admission does not soon stop somebody. Nobody overtakes the first, or long prompts would starve.
        """
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return None
        place, request_id = self._waiting[0]
        promised = sum(self._pages_for(need, need.num_pending) + 1 for need in map(needs_of, self.running))
        wanted = promised + supply.pages_to_start(request_id)
        if self._running and supply.available_pages(wanted) < wanted:
            return None
        del self._waiting[0]
        insort(self._running, (place, request_id))
        return request_id

    def plan(self, needs_of: NeedsOf, supply: PageSupply) -> Schedule:
        """Rows for the running requests; the last in precedence stop while the pages do not suffice.

        Example: 3 pages can be had, and four requests that decode cross a page boundary: the fourth is stopped.
        """
        needs = [needs_of(request_id) for _, request_id in self._running]
        spans = self._share_rows(needs)
        wanted = self._pages_wanted(needs, spans)
        available = supply.available_pages(wanted)
        preempted = []
        while wanted > available and len(needs) > 1:
            victim = needs.pop()
            available += supply.pages_from(victim.request_id)
            self.preempt(victim.request_id)
            preempted.append(victim.request_id)
            spans = self._share_rows(needs)
            wanted = self._pages_wanted(needs, spans)
        return Schedule(tuple(preempted), StepPlan(tuple(span for span in spans if span.num_known)))

    def _share_rows(self, needs: list[RequestNeeds]) -> list[PlannedSpan]:
        """A span for each request, empty where no rows are left: decoding requests first, then prefill."""
        left = self.max_rows
        spans: dict[RequestId, PlannedSpan] = {}
        for is_prefill in (False, True):
            for need in needs:
                if (need.num_pending > 1) != is_prefill:
                    continue
                span = _span(need, left)
                spans[need.request_id] = span
                left -= span.num_known + span.verify_len
        return [spans[need.request_id] for need in needs]

    def _pages_wanted(self, needs: list[RequestNeeds], spans: list[PlannedSpan]) -> int:
        return sum(self._pages_for(need, span.num_rows) for need, span in zip(needs, spans, strict=True))

    def _pages_for(self, need: RequestNeeds, num_rows: int) -> int:
        """Pages that a request must take to write so many rows; one without rows takes none."""
        return max(-(-(need.committed + num_rows) // self.page_tokens) - need.num_pages, 0)


def _span(need: RequestNeeds, left: int) -> PlannedSpan:
    """As many rows of a request as are left: known tokens first, then drafts."""
    num_known = min(need.num_pending, left)
    if need.max_chunk is not None:
        num_known = min(num_known, need.max_chunk)
    verify_len = min(need.verify_len, left - num_known) if num_known == need.num_pending else 0
    return PlannedSpan(need.request_id, num_known, verify_len)
