"""Fleet: several replicas that answer as one engine, and finish each other's requests when one of them dies."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import Outline
from dspark.engine.async_engine import EngineBusyError, EngineDrainingError, EngineStatus, wait_until_idle
from dspark.engine.intake import check_request
from dspark.engine.loop_thread import EngineDeadError
from dspark.engine.prompts import Prompt, prompt_token_ids
from dspark.engine.request import Emission
from dspark.engine.sample_stream import SampleStream
from dspark.sampling import uses_ratio_test
from dspark.scheduler.plan import RequestId
from dspark.serve.replicas.affinity import PrefixAffinity
from dspark.serve.replicas.progress import SampleProgress
from dspark.serve.replicas.replica import Replica, ReplicaCall, ReplicaDownError
from dspark.serve.replicas.summary import summary_of
from dspark.serve.replicas.watch import ReplicaWatch
from dspark.state.model_state import ModelState

_LOG = logging.getLogger("dspark.serve")

# A request that brings down every replica that it meets must end.
MAX_ATTEMPTS = 3


@dataclass(eq=False)
class FollowedCall:
    """A call on its way, on one replica after another if need be.

    Attributes:
        call: what was asked.
        request_ids: of its samples, as the reader of the stream knows them.
        stream: where the emissions go.
        progress: of each sample.
        accepted: done once a replica has taken the call, or with the refusal.
    """

    call: ReplicaCall
    request_ids: Sequence[str]
    stream: SampleStream
    progress: list[SampleProgress]
    accepted: "asyncio.Future[None]"

    def hand_on(self, part: Sequence[tuple[int, Emission]]) -> None:
        """Give the reader what it has not been told yet."""
        for index, emission in part:
            fresh = self.progress[index].take(emission)
            if fresh is not None:
                self.stream.push(replace(fresh, request_id=self.request_ids[index]), time.monotonic())

    def require_repeatable(self, error: ReplicaDownError) -> None:
        """Refuse to go on where another run would not give the same tokens."""
        for params, sample in zip(self.call.params, self.progress, strict=True):
            if uses_ratio_test(params) and sample.token_ids:
                raise EngineDeadError(
                    f"the replica that ran this request is gone ({error}), and a request of the ratio sampler cannot "
                    "go on elsewhere: ask again"
                ) from error


class Fleet:
    """Replicas behind the interface that the server uses of an `AsyncEngine`.

    A request goes to one replica and, if that dies, to another, which skips what was told before. Requests of the
    ratio sampler cannot go on like that, because their tokens depend on the drafts; once begun they fail in a sentence.

    Args:
        assembly: what is known of the engines; they are all alike.
        replicas: at least one.
        max_waiting: requests that may wait for each replica; None for any number.
    """

    def __init__(self, assembly: Outline, replicas: Sequence[Replica], max_waiting: int | None = None) -> None:
        self.assembly = assembly
        self.tokenizer = assembly.tokenizer
        self.max_model_len = assembly.max_model_len
        self.max_waiting = max_waiting
        self._replicas = list(replicas)
        page_tokens = ModelState.page_tokens_of(assembly.plan)
        self._affinity = PrefixAffinity(page_tokens, slack=assembly.config.max_num_seqs)
        self._watch = ReplicaWatch(self._replicas, self._affinity.forget)
        self._loads = dict.fromkeys(range(len(self._replicas)), 0)
        self._followed: dict[asyncio.Task[None], FollowedCall] = {}
        self._names = count(1)
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def capacity(self) -> int | None:
        """Requests that may be here at once while all replicas are up; None without a limit."""
        if self.max_waiting is None:
            return None
        return len(self._replicas) * (self.assembly.config.max_num_seqs + self.max_waiting)

    @property
    def max_len(self) -> int:
        """Tokens that one request can ever hold, see `AsyncEngine.max_len`."""
        pages = [status.loop.num_pages for status in self._watch.known.values()]
        return min(self.max_model_len, *(number * self._affinity.page_tokens for number in pages))

    async def start(self) -> None:
        """Wait for the replicas. Raises ReplicaDownError where none comes up."""
        await self._watch.start()

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Sequence[SamplingParams]],
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> SampleStream:
        """Hand in several prompts, see `AsyncEngine.submit`. Replicas accept all of them, or none goes on."""
        self._require_open(sum(map(len, params)))
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        calls = [
            ReplicaCall(f"{name}.{number}", tuple(prompt_token_ids(self.tokenizer, prompt)), tuple(own), priority)
            for number, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        for call in calls:
            # Whom it goes to depends on its tokens, so they must be tokens.
            self._check(call)
        names = [[f"{call.name}.{sample}" for sample in range(len(call.params))] for call in calls]
        tasks: list[asyncio.Task[None]] = []

        def discard(_: Sequence[RequestId]) -> None:
            for task in tasks:
                task.cancel()

        stream = SampleStream([request_id for own in names for request_id in own], discard, deadline)
        followed = []
        for call, own in zip(calls, names, strict=True):
            progress = [SampleProgress() for _ in own]
            followed.append(FollowedCall(call, own, stream, progress, asyncio.get_running_loop().create_future()))
            tasks.append(self._begin(followed[-1]))
        try:
            await asyncio.gather(*(one.accepted for one in followed))
        except BaseException:
            stream.close()
            raise
        return stream

    def _check(self, call: ReplicaCall) -> None:
        """Refuse what every replica would. Raises ConfigError."""
        num_tokens = min(self.assembly.plan.vocab_size, self.tokenizer.vocab_size)
        for params in call.params:
            check_request(call.prompt_ids, params, max_model_len=self.max_model_len, num_valid_tokens=num_tokens)

    def _begin(self, followed: FollowedCall) -> "asyncio.Task[None]":
        """Follow a call in the background until its samples have ended."""
        task = asyncio.create_task(self._follow(followed))
        self._followed[task] = followed
        self._idle.clear()

        def end(task: "asyncio.Task[None]") -> None:
            del self._followed[task]
            followed.accepted.cancel()
            if not self._followed:
                self._idle.set()

        task.add_done_callback(end)
        return task

    async def _follow(self, followed: FollowedCall) -> None:
        """Run a call to its end, on as many replicas as it takes."""
        try:
            for attempt in range(MAX_ATTEMPTS):
                try:
                    return await self._attempt(followed, attempt)
                except ReplicaDownError as error:
                    followed.require_repeatable(error)
                    _LOG.warning("%s: attempt %d ended with its replica: %s", followed.call.name, attempt + 1, error)
            raise EngineDeadError(f"{MAX_ATTEMPTS} replicas ended while they ran this request: it is given up")
        except Exception as error:
            if followed.accepted.done():
                followed.stream.fail(error)
            else:
                followed.accepted.set_exception(error)

    async def _attempt(self, followed: FollowedCall, attempt: int) -> None:
        """One replica's run of a call. Raises ReplicaDownError when it ends early."""
        call = followed.call
        number = self._affinity.choose(call.prompt_ids, self._loads_of_up())
        for sample in followed.progress:
            sample.begin_again()
        self._loads[number] += len(call.params)
        try:
            run = self._replicas[number].emissions(replace(call, name=f"{call.name}/{attempt}"))
            async with contextlib.aclosing(run) as parts:
                async for part in parts:
                    if not followed.accepted.done():
                        followed.accepted.set_result(None)
                    followed.hand_on(part)
        except ReplicaDownError as error:
            self._watch.mark_down(number, str(error))
            raise
        finally:
            self._loads[number] -= len(call.params)
        if not all(sample.is_finished for sample in followed.progress):
            raise ReplicaDownError("its answer ended early")

    def _require_open(self, num_requests: int) -> None:
        """Refuse what nobody would run soon."""
        if self._is_draining:
            raise EngineDrainingError("the engine is shutting down and takes no more requests")
        num_up = len(self._loads_of_up())
        if self.max_waiting is None:
            return
        held, capacity = sum(self._loads.values()), num_up * (self.assembly.config.max_num_seqs + self.max_waiting)
        if held + num_requests > capacity:
            raise EngineBusyError(f"{num_up} replicas hold {held} of at most {capacity} requests: try again later")

    def _loads_of_up(self) -> dict[int, int]:
        loads = {number: self._loads[number] for number in self._watch.up}
        if not loads:
            reasons = "; ".join(dict.fromkeys(self._watch.down.values()))
            raise EngineDeadError(f"no replica is up ({reasons}): try again when one has been restarted")
        return loads

    def status(self) -> EngineStatus:
        """Sums over the replicas as they last answered."""
        return summary_of(self._watch.known, self._watch.down, self._is_draining, sum(self._loads.values()))

    async def refresh(self, timeout_s: float = 0.5) -> EngineStatus:
        """The same, asked for now if the answers come in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._watch.poll(None)
        return self.status()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for those that run; True when all came to their own end."""
        self._is_draining = True
        return await wait_until_idle(self._idle, timeout_s, self._end_all)

    def _end_all(self, error: Exception) -> None:
        for followed in list(self._followed.values()):
            if not followed.accepted.done():
                followed.accepted.set_exception(error)  # or its caller would see that it was cancelled
            followed.stream.fail(error)
            followed.stream.close()

    async def shutdown(self) -> None:
        """End every request and every replica; may be called again."""
        self._is_draining = True
        self._end_all(EngineDrainingError("the engine is shutting down"))
        self._watch.stop()
        await asyncio.gather(*(replica.shutdown() for replica in self._replicas))
