"""When requests are sent: so many at once (closed loop), or at random moments that no answer delays (open loop)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dspark.config.errors import DSparkError

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ClosedLoop:
    """Each of so many clients sends its next request when it has its answer.

    Args:
        concurrency: clients, >= 1.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise DSparkError(f"the concurrency must be at least 1, not {self.concurrency}")

    @property
    def name(self) -> str:
        """Short form for tables."""
        return f"{self.concurrency} at once"


@dataclass(frozen=True)
class OpenLoop:
    """Requests arrive as a Poisson process: the gaps are exponential, and no answer is waited for.

    Args:
        rate: mean arrivals a second, > 0.
        seed: of the gaps; the same seed gives the same moments.
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise DSparkError(f"the rate must be a positive number of requests a second, not {self.rate}")

    @property
    def name(self) -> str:
        """Short form for tables."""
        return f"{self.rate:g}/s"


Load = ClosedLoop | OpenLoop


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Moments of arrival in seconds from the start, ascending; the first request arrives at once."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


async def run_load(
    load: Load,
    jobs: Sequence[Job],
    send: Callable[[Job, float], Awaitable[Result]],
    on_result: Callable[[Result], None],
) -> None:
    """Send every job and hand out each result as it comes.

    Args:
        load: when they are sent.
        jobs: in the order of sending.
        send: takes a job and the moment (`time.perf_counter`) at which it was due; never raises for a failed request.
        on_result: called in the order of completion. What is in flight when this is cancelled is never handed out.
    """
    if isinstance(load, ClosedLoop):
        await _run_closed(load, jobs, send, on_result)
    else:
        await _run_open(load, jobs, send, on_result)


async def _run_closed(
    load: ClosedLoop,
    jobs: Sequence[Job],
    send: Callable[[Job, float], Awaitable[Result]],
    on_result: Callable[[Result], None],
) -> None:
    waiting = iter(jobs)

    async def client() -> None:
        for job in waiting:
            on_result(await send(job, time.perf_counter()))

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(load.concurrency, len(jobs))):
            clients.create_task(client())


async def _run_open(
    load: OpenLoop,
    jobs: Sequence[Job],
    send: Callable[[Job, float], Awaitable[Result]],
    on_result: Callable[[Result], None],
) -> None:
    start = time.perf_counter()

    async def one(job: Job, due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        on_result(await send(job, due))

    async with asyncio.TaskGroup() as arrivals:
        for job, after in zip(jobs, poisson_arrivals(load.rate, len(jobs), load.seed), strict=True):
            arrivals.create_task(one(job, start + after))
