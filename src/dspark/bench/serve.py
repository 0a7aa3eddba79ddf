"""Load on one or two servers, level by level; two sides take turns in blocks of the same requests.

A level is one load (so many clients, or so many arrivals a second). Within a level each side first answers warm-up
requests, which are counted and enter no figure. With two sides the measured requests are cut into blocks, and the
sides take turns: first-second, second-first, and so on, so that a machine that slows down meets both alike.
"""

import asyncio
import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dspark.bench.load import ClosedLoop, Load, run_load
from dspark.bench.prompts import BenchPrompt
from dspark.bench.serve_client import LoadRequest, RequestRecord, ServeClient
from dspark.bench.serve_compare import Comparison, compare
from dspark.bench.serve_metrics import Figures, Rounds, e2e_ms, figures_of, ttft_ms
from dspark.bench.serve_requests import RequestSettings, random_requests, text_requests
from dspark.bench.serve_scrape import read_rounds, rounds_between
from dspark.config.errors import DSparkError
from dspark.engine.machine import describe_machine

SCHEMA = "dspark.bench.serve/1"
_MIN_WARMUP = 4
_MIN_BLOCK = 8


@dataclass(frozen=True)
class Target:
    """One side: a server under a name.

    Args:
        name: unique in a report.
        url: with or without /v1.
        model: the served name; None takes the first that the server lists.
        arguments: with which the benchmark started it, or empty.
    """

    name: str
    url: str
    model: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeSettings:
    """How the load is made.

    Args:
        num_requests: measured at each level on each side.
        num_warmup: before them; None takes as many as are in flight at once, and 4 at least.
        block_len: requests of a block in a comparison; None takes twice the requests in flight, or a quarter of all in
            an open loop, and 8 at least.
        timeout_s: for one request.
        api_key: bearer token, or None.
    """

    num_requests: int
    num_warmup: int | None = None
    block_len: int | None = None
    timeout_s: float = 300.0
    api_key: str | None = None

    def __post_init__(self) -> None:
        if (
            self.num_requests < 1
            or (self.num_warmup or 0) < 0
            or (self.block_len or 1) < 1
            or not 0 < self.timeout_s < math.inf
        ):
            raise DSparkError(
                "a benchmark needs at least 1 request, no negative warm-up, blocks of at least 1 and a positive "
                f"timeout, not {self.num_requests}, {self.num_warmup}, {self.block_len} and {self.timeout_s:g}"
            )

    def warmup_of(self, load: Load) -> int:
        """Warm-up requests at one level."""
        return max(_MIN_WARMUP, _in_flight(load)) if self.num_warmup is None else self.num_warmup

    def block_of(self, load: Load, num_sides: int) -> int:
        """Requests of a block at one level; a side alone has one block."""
        if num_sides == 1:
            return self.num_requests
        if self.block_len is None:
            # Arrivals begin anew in each block, so an open loop gets few and long ones.
            wanted = 2 * load.concurrency if isinstance(load, ClosedLoop) else -(-self.num_requests // 4)
            return max(_MIN_BLOCK, wanted)
        if self.block_len < min(_in_flight(load), self.num_requests):
            raise DSparkError(f"a block of {self.block_len} requests cannot keep {load.name}: give a longer --block")
        return self.block_len


@dataclass
class LevelSide:
    """What has been measured of one side at one level so far."""

    warmup: list[RequestRecord] = field(default_factory=list)
    blocks: list[list[RequestRecord]] = field(default_factory=list)
    before: Rounds | None = None
    after: Rounds | None = None

    @property
    def figures(self) -> Figures:
        """Of the records so far."""
        return figures_of(self.blocks, warmup=self.warmup, rounds=rounds_between(self.before, self.after))


@dataclass(frozen=True)
class Level:
    """One load: figures of each side, and with two sides their comparison."""

    load: Load
    sides: tuple[Figures, ...]
    comparison: Comparison | None
    records: tuple[tuple[RequestRecord, ...], ...]


@dataclass(frozen=True)
class ServeReport:
    """The whole benchmark."""

    targets: tuple[Target, ...]
    models: tuple[str, ...]
    has_token_ids: tuple[bool, ...]
    settings: dict[str, Any]
    machine: dict[str, Any]
    levels: tuple[Level, ...]
    is_interrupted: bool

    @property
    def num_different(self) -> int:
        """Outputs that differ between two sides which must agree: both servers promise the same tokens."""
        if not all(self.has_token_ids):
            return 0
        return sum(level.comparison.num_different for level in self.levels if level.comparison is not None)

    @property
    def num_failed(self) -> int:
        """Failed requests of all levels and sides."""
        return sum(side.num_failed for level in self.levels for side in level.sides)

    def as_json(self) -> dict[str, Any]:
        """For programs; every figure of the tables and what it was computed from."""
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "settings": self.settings,
            "sides": [
                {**asdict(target), "model": model, "offers_token_ids": has_ids}
                for target, model, has_ids in zip(self.targets, self.models, self.has_token_ids, strict=True)
            ],
            "interrupted": self.is_interrupted,
            "levels": [_level_json(level) for level in self.levels],
        }


@dataclass
class _Run:
    """State of a run, kept apart from the coroutine so that an interruption loses nothing."""

    targets: Sequence[Target]
    loads: Sequence[Load]
    settings: ServeSettings
    requests: RequestSettings
    prompts: Sequence[BenchPrompt]
    on_result: Callable[[RequestRecord], None]
    clients: list[ServeClient] = field(default_factory=list)
    levels: list[tuple[Load, list[LevelSide]]] = field(default_factory=list)

    async def measure(self) -> None:
        """Measure every level."""
        async with AsyncExitStack() as stack:
            for target in self.targets:
                client = await open_client(target, self.settings.timeout_s, self.settings.api_key)
                stack.push_async_callback(client.close)
                self.clients.append(client)
            for load in self.loads:
                await self._measure_level(load)

    async def _measure_level(self, load: Load) -> None:
        count, num_warmup = self.settings.num_requests, self.settings.warmup_of(load)
        made = await self._make_requests(count + num_warmup)
        sides = [LevelSide() for _ in self.clients]
        self.levels.append((load, sides))
        for client, side in zip(self.clients, sides, strict=True):
            await run_load(load, made[count:], client.send, self._keep(side.warmup))
            side.before = read_rounds(await client.get_text("/metrics"))
        block_len = self.settings.block_of(load, len(sides))
        for number, start in enumerate(range(0, count, block_len)):
            block = made[start : min(start + block_len, count)]
            order = list(zip(self.clients, sides, strict=True))
            for client, side in order if number % 2 == 0 else reversed(order):
                side.blocks.append([])
                await run_load(load, block, client.send, self._keep(side.blocks[-1]))
        for client, side in zip(self.clients, sides, strict=True):
            side.after = read_rounds(await client.get_text("/metrics"))

    async def _make_requests(self, count: int) -> list[LoadRequest]:
        if self.requests.input_len is not None:
            return await random_requests(self.clients[0], count, self.requests)
        return text_requests(self.prompts, count, self.requests)

    def _keep(self, records: list[RequestRecord]) -> Callable[[RequestRecord], None]:
        def keep(record: RequestRecord) -> None:
            records.append(record)
            self.on_result(record)

        return keep


def run_serve_bench(
    targets: Sequence[Target],
    loads: Sequence[Load],
    prompts: Sequence[BenchPrompt],
    settings: ServeSettings,
    requests: RequestSettings,
    *,
    on_result: Callable[[RequestRecord], None] = lambda record: None,
) -> ServeReport:
    """Measure one side, or two against each other.

    Args:
        targets: one or two servers that answer.
        loads: levels, in order.
        prompts: sent in turn; not read when `requests.input_len` asks for random tokens.
        settings, requests: of the load and of each request.
        on_result: called after each request, warm-up included.

    Returns:
        The figures; after Ctrl-C those of the requests that were finished.

    Raises:
        DSparkError: there is nothing to measure, or a server does not answer.
    """
    if not 1 <= len(targets) <= 2 or not loads or not (prompts or requests.input_len):
        raise DSparkError("a benchmark needs one or two servers, a load and a prompt")
    for load in loads:
        settings.block_of(load, len(targets))
    run = _Run(targets, loads, settings, requests, prompts, on_result)
    is_interrupted = False
    try:
        with _quiet_collector():
            asyncio.run(run.measure())
    except KeyboardInterrupt:
        if not any(side.blocks for _, sides in run.levels for side in sides):
            raise
        is_interrupted = True
    return ServeReport(
        targets=tuple(targets),
        models=tuple(client.model for client in run.clients),
        has_token_ids=tuple(client.wants_token_ids for client in run.clients),
        settings={**asdict(requests), **_public(settings)},
        machine=describe_machine(torch.device("cpu")),
        levels=tuple(_as_level(load, sides) for load, sides in run.levels),
        is_interrupted=is_interrupted,
    )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep what is loaded out of garbage collections: one over a large heap stops the client for tenths of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def num_expected(loads: Sequence[Load], num_sides: int, settings: ServeSettings) -> int:
    """Requests that a run sends, warm-up included."""
    return num_sides * sum(settings.num_requests + settings.warmup_of(load) for load in loads)


async def open_client(target: Target, timeout_s: float, api_key: str | None) -> ServeClient:
    """A client of a server that answers, with the model's name and whether it offers token ids.

    Raises:
        DSparkError: it does not answer, or lists no model.
    """
    url = target.url.rstrip("/").removesuffix("/v1")
    client = ServeClient(url, target.model or "", timeout_s, api_key)
    listed = await client.get_text("/v1/models")
    if listed is None:
        await client.close()
        raise DSparkError(f"{url} does not answer /v1/models: is a server running there, and is the API key right?")
    client.model = target.model or _first_model(listed, url)
    client.wants_token_ids = await client.get_text("/debug/engine") is not None
    return client


def _first_model(listed: str, url: str) -> str:
    try:
        return str(json.loads(listed)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise DSparkError(f"{url} lists no model at /v1/models: name one with --served-model") from error


def _in_flight(load: Load) -> int:
    return load.concurrency if isinstance(load, ClosedLoop) else 1


def _public(settings: ServeSettings) -> dict[str, Any]:
    """A report is shown around: it does not hold the key."""
    return {name: value for name, value in asdict(settings).items() if name != "api_key"}


def _as_level(load: Load, sides: Sequence[LevelSide]) -> Level:
    blocks = [side.blocks for side in sides]
    return Level(
        load=load,
        sides=tuple(side.figures for side in sides),
        comparison=compare(*blocks) if len(sides) == 2 else None,
        records=tuple(tuple(record for block in side.blocks for record in block) for side in sides),
    )


def _level_json(level: Level) -> dict[str, Any]:
    kind = "closed" if isinstance(level.load, ClosedLoop) else "open"
    return {
        "load": {"kind": kind, **asdict(level.load)},
        "sides": [asdict(figures) for figures in level.sides],
        "comparison": None if level.comparison is None else asdict(level.comparison),
        "requests": [[_record_json(record) for record in records] for records in level.records],
    }


def _record_json(record: RequestRecord) -> dict[str, Any]:
    is_done = record.error is None
    return {
        "number": record.number,
        "name": record.name,
        "sent_s": record.sent,
        "ended_s": record.ended,
        "ttft_ms": ttft_ms(record) if is_done else None,
        "e2e_ms": e2e_ms(record) if is_done else None,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "message": record.message,
    }
