"""First come, first served: running requests verify, and what is left of a step's rows goes to prefill in order."""

from collections import deque
from collections.abc import Callable

from dspark.config.errors import ConfigError
from dspark.scheduler.plan import PlannedSpan, RequestId, RequestNeeds, StepPlan


class FifoScheduler:
    """Admits a request when a slot is free and its longest possible length fits in pages, so it never has to stop.

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
        self.waiting: deque[RequestNeeds] = deque()
        self._pages_of: dict[RequestId, int] = {}

    @property
    def running(self) -> tuple[RequestId, ...]:
        """Admitted requests, oldest first."""
        return tuple(self._pages_of)

    def add(self, request: RequestNeeds) -> None:
        """Queue a request. Raises ConfigError when it can never fit."""
        needed = self._pages(request)
        if needed > self.num_pages:
            raise ConfigError(
                f"a request of up to {request.max_len} tokens needs {needed} pages and the engine has "
                f"{self.num_pages}: lower max_tokens, shorten the prompt or raise max_num_pages"
            )
        self.waiting.append(request)

    def admit(self) -> list[RequestId]:
        """Move waiting requests to running, in order, while they fit."""
        admitted = []
        while self.waiting and len(self._pages_of) < self.max_num_seqs:
            needed = self._pages(self.waiting[0])
            if sum(self._pages_of.values()) + needed > self.num_pages:
                break
            request = self.waiting.popleft()
            self._pages_of[request.request_id] = needed
            admitted.append(request.request_id)
        return admitted

    def plan(self, needs_of: Callable[[RequestId], RequestNeeds]) -> StepPlan:
        """Rows for every running request: decoding ones first, then prefill chunks from what is left."""
        needs = [needs_of(request_id) for request_id in self._pages_of]
        left = self.max_rows
        spans = []
        for request in sorted(needs, key=lambda need: need.num_pending > 1):
            num_known = min(request.num_pending, left)
            if num_known == 0:
                continue
            is_last = num_known == request.num_pending
            verify_len = min(request.verify_len, left - num_known) if is_last else 0
            spans.append(PlannedSpan(request.request_id, num_known, verify_len))
            left -= num_known + verify_len
        return StepPlan(tuple(spans))

    def finish(self, request_id: RequestId) -> None:
        """Forget a request, running or waiting."""
        self._pages_of.pop(request_id, None)
        self.waiting = deque(request for request in self.waiting if request.request_id != request_id)

    def _pages(self, request: RequestNeeds) -> int:
        return -(-request.max_len // self.page_tokens)
