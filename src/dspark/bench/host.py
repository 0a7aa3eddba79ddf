"""What an engine costs beside its passes: the scheduler alone, and whole steps over a model that computes nothing."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dspark.bench.null_model import null_model
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import Assembly, build_loop
from dspark.engine.loop import EngineLoop
from dspark.engine.machine import describe_machine
from dspark.scheduler.plan import RequestId, RequestNeeds
from dspark.scheduler.scheduler import Place, Scheduler

SCHEDULER_REQUESTS = (1, 64, 256)
ENGINE_REQUESTS = (1, 4, 16)
SCHEMA = "dspark.bench.host/1"
_PAGE = 64
_WIDTH = 5
_LONG = 2**40


@dataclass(frozen=True)
class SchedulerFigure:
    """Plans a second with so many running requests, each of which decodes five drafts."""

    num_requests: int
    steps_per_second: float


@dataclass(frozen=True)
class EngineFigure:
    """Steps of the whole engine.

    Attributes:
        num_requests: running at once.
        host_ms, host_tokens: of a step over the null model, and tokens that it emitted.
        model_ms, model_tokens: of a step over the real model.
    """

    num_requests: int
    host_ms: float
    host_tokens: float
    model_ms: float
    model_tokens: float

    @property
    def host_us_per_token(self) -> float:
        """Engine overhead of a token."""
        return 1e3 * self.host_ms / self.host_tokens

    @property
    def host_share(self) -> float:
        """Share of a real step that is no pass."""
        return self.host_ms / self.model_ms


@dataclass(frozen=True)
class HostReport:
    """All figures on one machine."""

    model: str
    machine: dict[str, Any]
    scheduler: tuple[SchedulerFigure, ...]
    engine: tuple[EngineFigure, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        engine = [
            {**asdict(row), "host_us_per_token": row.host_us_per_token, "host_share": row.host_share}
            for row in self.engine
        ]
        scheduler = [asdict(row) for row in self.scheduler]
        return {
            "schema": SCHEMA,
            "model": self.model,
            "machine": self.machine,
            "scheduler": scheduler,
            "engine": engine,
        }


class NullRequests:
    """Requests that are numbers: every step accepts some drafts and drafts five more. Pages never run out."""

    def __init__(self, count: int) -> None:
        self.committed: dict[RequestId, int] = dict.fromkeys(range(count), 0)

    def needs_of(self, request_id: RequestId) -> RequestNeeds:
        """A decoding request with five drafts."""
        committed = self.committed[request_id]
        return RequestNeeds(request_id, 1, _WIDTH, _LONG, committed, -(-committed // _PAGE))

    def advance(self, scheduler: Scheduler) -> None:
        """One plan, and what it leads to."""
        for span in scheduler.plan(self.needs_of, self).plan.spans:
            self.committed[span.request_id] += 1 + self.committed[span.request_id] % (1 + span.verify_len)

    def available_pages(self, wanted: int) -> int:
        """See `PageSupply`."""
        return wanted

    def pages_to_start(self, request_id: RequestId) -> int:
        """See `PageSupply`."""
        return 1

    def pages_from(self, request_id: RequestId) -> int:
        """See `PageSupply`."""
        return 1


def time_scheduler(num_requests: int, seconds: float) -> SchedulerFigure:
    """Plan for so long."""
    scheduler = Scheduler(num_requests, num_requests * (1 + _WIDTH), _LONG, _PAGE)
    requests = NullRequests(num_requests)
    for number in range(num_requests):
        scheduler.add(number, Place(0, number))
        scheduler.next_to_start(requests.needs_of, requests)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        requests.advance(scheduler)
        steps += 1
    return SchedulerFigure(num_requests, steps / (time.perf_counter() - began))


def run_host_bench(
    assembly: Assembly, model: str, prompt_ids: list[int], seconds: float, on_figure: Callable[[], None]
) -> HostReport:
    """Measure the scheduler, and both engines in turns for each number of requests.

    Args:
        assembly: an engine that speculates; its own settings and state sizes are used for the null model too.
        prompt_ids: every request has this prompt.
        seconds: for each figure.
    """
    scheduler = []
    for count in SCHEDULER_REQUESTS:
        scheduler.append(time_scheduler(count, seconds))
        on_figure()
    speculation = assembly.speculation
    null_loop = build_loop(
        null_model(assembly.plan),
        assembly.tokenizer,
        assembly.config,
        replace(speculation, health=None),
        assembly.max_model_len,
        torch.device(assembly.device),
    )
    engine = []
    for count in ENGINE_REQUESTS:
        host_ms, host_tokens = time_steps(null_loop, count, prompt_ids, seconds)
        model_ms, model_tokens = time_steps(assembly.loop, count, prompt_ids, seconds)
        engine.append(EngineFigure(count, host_ms, host_tokens, model_ms, model_tokens))
        on_figure()
    return HostReport(model, describe_machine(torch.device(assembly.device)), tuple(scheduler), tuple(engine))


def time_steps(loop: EngineLoop, num_requests: int, prompt_ids: list[int], seconds: float) -> tuple[float, float]:
    """Mean milliseconds and tokens of decode steps with so many running requests."""
    room = loop.max_model_len - len(prompt_ids)
    params = SamplingParams(max_tokens=room, ignore_eos=True)
    numbers = _names()
    elapsed, steps, tokens = 0.0, 0, 0
    while elapsed < seconds or steps < 2:
        while len(loop.engine.requests) < num_requests:
            loop.add(next(numbers), prompt_ids, params)
        status = loop.status()
        is_decoding = status.num_running == num_requests and all(
            loop.engine.needs(name).num_pending == 1 for name in loop.scheduler.running
        )
        began = time.perf_counter()
        emissions = loop.step()
        if is_decoding:
            elapsed += time.perf_counter() - began
            steps += 1
            tokens += sum(len(emission.token_ids) for emission in emissions)
    for name in list(loop.engine.requests):
        loop.abort(name)
    return 1e3 * elapsed / steps, tokens / steps


def _names() -> Iterator[str]:
    number = 0
    while True:
        yield f"timed-{number}"
        number += 1
