"""AsyncEngine: an engine for many callers of one event loop, each with a stream of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from dspark.config import Config, SamplingParams
from dspark.config.checks import require_int
from dspark.config.errors import DSparkError
from dspark.engine.assembly import Assembly, assemble
from dspark.engine.core import RUNNING
from dspark.engine.loop_commands import adding, do_nothing
from dspark.engine.loop_thread import EngineDeadError, LoopThread, StepLoop, StepOutcome
from dspark.engine.prompts import Prompt, prompt_token_ids
from dspark.engine.ranks.failure import RankError
from dspark.engine.request import Emission
from dspark.engine.sample_stream import SampleStream
from dspark.engine.status import LoopStatus
from dspark.scheduler.plan import RequestId

_LOG = logging.getLogger("dspark.engine")

EngineState = Literal["ready", "degraded", "draining", "dead"]

# The tokenizer needs milliseconds for a text of this many characters; longer ones are encoded beside the event loop.
_LONG_TEXT = 20_000
# A step takes milliseconds to seconds; one that lasts this long means that something hangs.
STALLED_AFTER_S = 60.0
_JOIN_TIMEOUT_S = 30.0


class EngineBusyError(DSparkError):
    """As many requests wait as the engine queues; the same call may succeed later."""


class EngineDrainingError(DSparkError):
    """The engine is about to end and takes no more requests, or has ended this one at its time limit."""


@dataclass(frozen=True)
class EngineStatus:
    """What an engine is doing.

    Attributes:
        state: "ready"; "degraded", which serves right tokens and has a reason to be looked at; "draining", which takes
            no more requests; "dead", which never will again.
        reason: why it is not ready.
        num_requests: requests whose streams have not ended.
        loop: numbers of the engine loop.
    """

    state: EngineState
    reason: str | None
    num_requests: int
    loop: LoopStatus


class AsyncEngine:
    """An engine on a thread of its own; all methods belong to one event loop.

    A stream holds what its reader has not read yet. That is bounded by the request's own max_tokens, so a slow reader
    delays nobody, and nothing in the engine waits for it.

    Args:
        model, config, draft, overrides: as for `LLM`.
        max_waiting: requests that may wait besides the max_num_seqs that run; None queues any number.
    Raises:
        ConfigError, CheckpointError: with what to change.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: Config | None = None,
        draft: str = "dspark",
        max_waiting: int | None = None,
        **overrides: Any,
    ) -> None:
        self._take_over(assemble(model, config=config, draft=draft, **overrides), max_waiting)

    @classmethod
    def over(cls, assembly: Assembly, *, max_waiting: int | None = None) -> Self:
        """An engine over parts that are assembled already; from now on they belong to it."""
        engine = cls.__new__(cls)
        engine._take_over(assembly, max_waiting)
        return engine

    def _take_over(self, assembly: Assembly, max_waiting: int | None) -> None:
        if max_waiting is not None:
            require_int("max_waiting", max_waiting, low=0)
        self.assembly = assembly
        self.tokenizer = assembly.tokenizer
        self.max_model_len = assembly.max_model_len
        self.max_waiting = max_waiting
        self._thread = LoopThread(assembly.loop, self._on_step, self._on_death)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[RequestId, SampleStream] = {}
        self._leaving: set[RequestId] = set()  # aborted, and the engine's thread may not know it yet
        self._ids = count(1)
        self._is_draining = False
        self._speculates = assembly.speculation_status == RUNNING
        self._error: EngineDeadError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        if assembly.share is not None:
            assembly.share.team.on_failure(self._on_rank_failure)

    async def start(self) -> None:
        """Start the engine's thread; the event loop that runs now is the one that it serves."""
        if self._event_loop is None and self._is_draining:
            return  # shut down before it ever ran
        if self._event_loop is None:
            self._event_loop = asyncio.get_running_loop()
            self._thread.start()
        elif self._event_loop is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncEngine belongs to another event loop: make one engine for each event loop")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def capacity(self) -> int | None:
        """Requests that may be here at once, running or waiting; None without a limit."""
        return None if self.max_waiting is None else self.assembly.config.max_num_seqs + self.max_waiting

    @property
    def max_len(self) -> int:
        """Tokens that one request can ever hold: what the context, and all pages together, have room for."""
        scheduler = self.assembly.loop.scheduler
        return min(self.max_model_len, scheduler.num_pages * scheduler.page_tokens)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncGenerator[Emission, None]:
        """Continue one prompt, an emission a round. Leaving the iterator aborts the request.

        Raises:
            ConfigError: the request can never run.
            EngineBusyError, EngineDrainingError, EngineDeadError: it can not run now, or not here.
        """
        samples = self.generate_samples(prompt, [params or SamplingParams()], request_id=request_id, priority=priority)
        async with contextlib.aclosing(samples):
            async for _, emission in samples:
                yield emission

    async def generate_samples(
        self, prompt: Prompt, params: Sequence[SamplingParams], *, request_id: str | None = None, priority: int = 0
    ) -> AsyncGenerator[tuple[int, Emission], None]:
        """Continue one prompt in several ways; (index of the parameters, emission). Errors as for `generate`."""
        stream = await self.submit([prompt], [params], request_id=request_id, priority=priority)
        with stream:
            async for index, emission in stream:
                yield index, emission

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Sequence[SamplingParams]],
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> SampleStream:
        """Hand in several prompts, each with the parameters of its samples; all are taken, or none is.

        Args:
            prompts: texts or token ids.
            params: for each prompt, one per sample. Samples count on from prompt to prompt in the stream.
            request_id: of the first sample; the others' ids are made from it. None makes one up.
            priority: lower values run first.
            deadline: time of the event loop after which the stream raises TimeoutError.
        Returns:
            a stream whose requests the engine has accepted; leaving its context aborts those that still run.
        """
        await self.start()
        prompt_ids = [await self._token_ids(prompt) for prompt in prompts]
        self._require_open(sum(map(len, params)))
        await self._compile_forms(params)
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        total = sum(map(len, params))
        request_ids: list[RequestId] = [name if place == 0 else f"{name}.{place}" for place in range(total)]
        if self._leaving.intersection(request_ids):
            # What the last holder of the id emitted before its abort must not reach this one.
            await self._post(do_nothing)
        self._require_open(total)
        taken = [own for own in request_ids if own in self._streams]
        if taken:
            raise DSparkError(f"the request id {taken[0]!r} is running already: choose another")
        stream = SampleStream(request_ids, self._discard, deadline)
        # Emissions may come before the answer to the command: whoever waits for them must be known first.
        self._enter(stream)
        try:
            await self._post(adding(request_ids, prompt_ids, params, priority))
        except BaseException:
            # Also when the caller is cancelled after the command has run: the abort comes after it.
            stream.close()
            raise
        return stream

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream ends without another emission. True when it was there."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        stream.end_sample(request_id)
        await asyncio.wrap_future(self._begin_abort([request_id]))
        return True

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for those that are here; what still runs at the time limit is ended.

        Returns:
            True when every request has come to its own end.
        """
        self._is_draining = True
        return await wait_until_idle(self._idle, timeout_s, self._end_all)

    async def shutdown(self) -> None:
        """End every request and the thread; may be called again."""
        self._is_draining = True
        self._end_all(EngineDrainingError("the engine is shutting down"))
        if self._event_loop is None:
            return
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S):
            raise RuntimeError(f"the engine's thread has not ended within {_JOIN_TIMEOUT_S:.0f} s")

    def status(self) -> EngineStatus:
        """The loop's numbers of a moment ago, and the state of the engine now; waits for nothing."""
        state, reason = self._state()
        return EngineStatus(state, reason, len(self._streams), self._thread.status)

    async def refresh(self, timeout_s: float = 0.5) -> EngineStatus:
        """The same with numbers taken between two steps; the last known ones where a step takes longer."""
        await self.start()
        if self._event_loop is None:
            return self.status()
        with contextlib.suppress(TimeoutError, EngineDeadError):
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self._thread.refresh())
        return self.status()

    def _state(self) -> tuple[EngineState, str | None]:
        if self._error is not None:
            return "dead", str(self._error)
        if self._is_draining:
            return "draining", "the engine is shutting down and takes no more requests"
        began = self._thread.step_began
        if began is not None and (seconds := time.monotonic() - began) > STALLED_AFTER_S:
            return "degraded", f"one step of the engine has been running for {seconds:.0f} s"
        now = self._thread.status.speculation
        if self._speculates and now != RUNNING:
            return "degraded", f"speculation is {now}"
        return "ready", None

    async def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            return await asyncio.to_thread(prompt_token_ids, self.tokenizer, prompt)
        return prompt_token_ids(self.tokenizer, prompt)

    async def _compile_forms(self, params: Sequence[Sequence[SamplingParams]]) -> None:
        """Compile structured outputs beside the engine's thread, which finds them ready: a form may take a second.

        Raises:
            ConfigError: a form cannot be used.
        """
        forms = dict.fromkeys(own.structured for group in params for own in group)
        for form in forms:
            if form is not None:
                await asyncio.to_thread(self.assembly.loop.engine.grammars.start, form)

    def _require_open(self, num_requests: int) -> None:
        """Refuse requests that nobody would run soon, or ever."""
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if self._is_draining:
            raise EngineDrainingError("the engine is shutting down and takes no more requests")
        if num_requests == 0:
            raise DSparkError("there is nothing to run: give at least one prompt and one set of parameters")
        if self.capacity is None:
            return
        if num_requests > self.capacity:
            raise DSparkError(
                f"{num_requests} samples were asked for at once and the engine holds {self.capacity} "
                f"({self.assembly.config.max_num_seqs} running, {self.max_waiting} waiting): ask for fewer at a time"
            )
        if len(self._streams) + num_requests > self.capacity:
            raise EngineBusyError(
                f"the engine holds {len(self._streams)} of at most {self.capacity} requests "
                f"({self.assembly.config.max_num_seqs} running, {self.max_waiting} waiting): try again later"
            )

    async def _post(self, command: Callable[[StepLoop], Any]) -> Any:
        if self._event_loop is None:
            await self.start()
        return await asyncio.wrap_future(self._thread.post(command))

    def _enter(self, stream: SampleStream) -> None:
        for request_id in stream.request_ids:
            self._streams[request_id] = stream
        self._idle.clear()

    def _forget(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _discard(self, request_ids: Sequence[RequestId]) -> None:
        """A reader has left: abort its requests without waiting for it."""
        self._begin_abort(request_ids).add_done_callback(_log_failure)

    def _begin_abort(self, request_ids: Sequence[RequestId]) -> Future[Any]:
        """Ask the engine's thread to abort requests; until it has, nobody else may take their ids."""
        self._forget(request_ids)
        self._leaving.update(request_ids)
        aborted = self._thread.post(lambda loop: [loop.abort(request_id) for request_id in request_ids])
        aborted.add_done_callback(partial(self._end_abort, request_ids))
        return aborted

    def _end_abort(self, request_ids: Sequence[RequestId], aborted: Future[Any]) -> None:
        """In either thread: the event loop learns it after the last emission of those requests."""
        self._call_soon(self._leaving.difference_update, request_ids)

    def _end_all(self, error: Exception) -> None:
        """End every stream with an error."""
        for stream in set(self._streams.values()):
            stream.fail(error)
            stream.close()

    def _on_step(self, outcome: StepOutcome) -> None:
        """In the engine's thread: carry emissions over."""
        self._call_soon(self._dispatch, outcome)

    def _on_death(self, error: BaseException) -> None:
        """In the engine's thread: nothing may wait for it any more."""
        assert isinstance(error, EngineDeadError)
        self._error = error
        self._call_soon(self._end_all, error)

    def _on_rank_failure(self, error: RankError) -> None:
        """In the thread that watches the ranks: the step may never return from a device that waits for one of them."""
        self._on_death(EngineDeadError(str(error)))

    def _call_soon(self, callback: Callable[..., None], argument: Any) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(callback, argument)

    def _dispatch(self, outcome: StepOutcome) -> None:
        """In the event loop: hand emissions to those who wait; late ones of an aborted request are dropped."""
        for emission in outcome.emissions:
            stream = self._streams.get(emission.request_id)
            if stream is None:
                continue
            if emission.finish_reason is not None:
                self._forget([emission.request_id])
            stream.push(emission, outcome.ended_at)


def _log_failure(aborted: Future[Any]) -> None:
    """Nobody waits for this abort, so nobody else would learn that it failed."""
    error = None if aborted.cancelled() else aborted.exception()
    if error is not None and not isinstance(error, EngineDeadError):
        _LOG.error("a request could not be aborted", exc_info=error)


async def wait_until_idle(idle: asyncio.Event, timeout_s: float | None, end_all: Callable[[Exception], None]) -> bool:
    """Wait for the last request; those that still run at the time limit are ended, and the answer is False."""
    try:
        async with asyncio.timeout(timeout_s):
            await idle.wait()
    except TimeoutError:
        end_all(EngineDrainingError(f"the engine is shutting down and ended this request after {timeout_s} s"))
        return False
    return True
