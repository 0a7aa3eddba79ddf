"""The samples of one HTTP request while the engine makes them."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from fastapi import Request

from dspark.config.sampling import SamplingParams
from dspark.engine.async_engine import EngineDrainingError
from dspark.engine.loop_thread import EngineDeadError
from dspark.engine.request import Emission
from dspark.engine.sample_stream import SampleStream
from dspark.serve.choice import Choice
from dspark.serve.service import Service, service_of

_LOG = logging.getLogger("dspark.serve")


@dataclass
class Generation:
    """Samples that run; iterating yields each emission with its choice, which has taken it already.

    Attributes:
        request_id: of the HTTP request.
        choices: prompt by prompt, and the samples of each.
        created: seconds since 1970.
    """

    request_id: str
    choices: list[Choice]
    created: int
    service: Service
    stream: SampleStream
    arrived_at: float
    _last_at: dict[int, float] = field(default_factory=dict)
    _is_closed: bool = False

    @property
    def speculation(self) -> str:
        """Whether drafts are proposed: "running", or "not running because ..."; forced acceptance is said here, too."""
        status = self.service.engine.status().loop.speculation
        forced = self.service.engine.assembly.speculation.forced
        return status if forced is None else f"{status} with forced acceptance, so the text is meaningless"

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, Emission]]:
        try:
            async for index, emission in self.stream:
                choice = self.choices[index]
                choice.take(emission)
                self._measure(choice, emission)
                yield choice, emission
        except Exception as error:
            self.close(_reason_of(error))
            raise

    async def finish(self) -> None:
        """Run to the end; the samples are aborted when this is cancelled."""
        try:
            async for _ in self:
                pass
        finally:
            self.close()

    def close(self, reason: str = "disconnect") -> None:
        """Abort what still runs, and write the one line about this request. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stream.close()
        cut = sum(choice.finish_reason is None for choice in self.choices)
        for _ in range(cut):
            self.service.metrics.aborted(reason)
        _LOG.info(
            "%s: %d prompt tokens, %d tokens in %d samples, %d of them cut (%s), %.3f s",
            self.request_id,
            sum(len(choice.prompt_ids) for choice in self.choices),
            sum(len(choice.token_ids) for choice in self.choices),
            len(self.choices),
            cut,
            reason if cut else "none",
            time.monotonic() - self.arrived_at,
        )

    def _measure(self, choice: Choice, emission: Emission) -> None:
        metrics, now = self.service.metrics, self.stream.emitted_at
        before = self._last_at.get(choice.index)
        self._last_at[choice.index] = now
        if before is None:
            metrics.first_token(now - self.arrived_at)
            if choice.index == 0 or self.choices[choice.index - 1].prompt_index != choice.prompt_index:
                metrics.prompt_taken(len(choice.prompt_ids))
        if not choice.is_scoring and emission.token_ids:
            metrics.tokens(len(emission.token_ids), None if before is None else now - before)
        if choice.finish_reason is not None:
            metrics.finished(choice.finish_reason, len(choice.token_ids), now - self.arrived_at)


def _reason_of(error: Exception) -> str:
    """Why samples were cut, as the metrics call it."""
    match error:
        case TimeoutError():
            return "timeout"
        case EngineDrainingError():
            return "shutdown"
        case EngineDeadError():
            return "engine_dead"
    return "error"


async def begin(
    request: Request,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    priority: int = 0,
    is_scoring: bool = False,
) -> Generation:
    """Hand the samples of an HTTP request to the engine, all or none.

    Args:
        request: has an id, a time of arrival and a deadline in its state.
        prompts: token ids of each.
        params: of the samples of each prompt.
        priority: lower values run first.
        is_scoring: drop the drawn token.
    Raises:
        ConfigError, EngineBusyError, EngineDrainingError, EngineDeadError: see `AsyncEngine`.
    """
    service = service_of(request)
    stream = await service.engine.submit(
        prompts, [params] * len(prompts), priority=priority, deadline=request.state.deadline
    )
    choices = [
        Choice(number * len(params) + sample, number, prompt_ids, own.seed, is_scoring)
        for number, prompt_ids in enumerate(prompts)
        for sample, own in enumerate(params)
    ]
    return Generation(request.state.request_id, choices, int(time.time()), service, stream, request.state.arrived_at)
