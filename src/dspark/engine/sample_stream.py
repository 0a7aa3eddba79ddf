"""What one caller of an AsyncEngine reads: the emissions of its samples, in the order in which steps made them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from dspark.engine.request import Emission
from dspark.scheduler.plan import RequestId


class SampleStream:
    """An iterator over (sample, emission) that ends when every sample has; leaving its context aborts the others.

    Args:
        request_ids: of the samples.
        discard: aborts requests whose emissions nobody reads any more.
        deadline: time of the event loop after which reading raises TimeoutError; None for no limit.
    Attributes:
        emitted_at: monotonic time at which the step that made the last emission read had ended.
    """

    def __init__(
        self,
        request_ids: Sequence[RequestId],
        discard: Callable[[Sequence[RequestId]], None],
        deadline: float | None = None,
    ) -> None:
        self.request_ids = tuple(request_ids)
        self.deadline = deadline
        self.emitted_at = 0.0
        self._indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._running = dict.fromkeys(request_ids)
        self._discard = discard
        self._unread: deque[tuple[int, Emission, float]] = deque()
        self._error: Exception | None = None
        self._is_closed = False
        self._news = asyncio.Event()

    def push(self, emission: Emission, emitted_at: float) -> None:
        """Take an emission in."""
        if self._is_closed:
            return
        self._unread.append((self._indices[emission.request_id], emission, emitted_at))
        if emission.finish_reason is not None:
            self._running.pop(emission.request_id, None)
        self._news.set()

    def end_sample(self, request_id: RequestId) -> None:
        """No more emissions come for a sample that was aborted."""
        self._running.pop(request_id, None)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Raise an error in the reader, after what it has not read yet."""
        if self._error is None and self._running:
            self._error = error
        self._news.set()

    def close(self) -> None:
        """Abort what still runs; what was emitted before may still be read. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        running = tuple(self._running)
        self._running.clear()
        self._news.set()
        if running:
            self._discard(running)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Emission]:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._news.clear()
            async with asyncio.timeout_at(self.deadline):
                await self._news.wait()
        index, emission, self.emitted_at = self._unread.popleft()
        return index, emission
