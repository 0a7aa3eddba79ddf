"""Soak: the highest load for a long time, with everything that clients do wrong, and nothing may be left of it.

While it runs every answer is checked for what can be seen of it alone; each second the server is asked what it holds.
Afterwards the server must come to rest with no page, slot, file or request left, its memory must not have grown, and
a fair choice of its answers must be, token for token, what the same requests give when they are decoded alone.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Protocol

import torch

from dspark.bench.prompts import load_prompts
from dspark.bench.serve import Target, open_client
from dspark.bench.serve_client import ServeClient
from dspark.bench.soak_client import Outcome, SoakClient
from dspark.bench.soak_mix import Mix, MixSettings
from dspark.bench.soak_oracle import Reservoir, Verdict
from dspark.bench.soak_report import Server, SoakLog, SoakReport, violations_of
from dspark.bench.soak_watch import Sample, read_sample, trend_of
from dspark.config.errors import DSparkError
from dspark.engine.machine import describe_machine

_SAMPLE_EVERY_S = 1.0
_REST_S = 60.0


@dataclass(frozen=True)
class SoakSettings:
    """How hard and how long.

    Args:
        seconds: of load.
        concurrency: clients that always have a request in flight.
        burst: further requests sent at one moment, every `burst_every_s`; 0 sends none.
        seed: of everything random.
        num_checked: answers compared with the oracle.
        timeout_s: after which a request hangs.
        warmup_share: part of the time after which memory must be flat.
        max_body_bytes: longest body that the server takes, or None.
        has_structured: ask for structured output too.
        api_key: bearer token, or None.
    """

    seconds: float
    concurrency: int = 24
    burst: int = 24
    burst_every_s: float = 20.0
    seed: int = 0
    num_checked: int = 150
    timeout_s: float = 300.0
    warmup_share: float = 0.25
    max_body_bytes: int | None = None
    has_structured: bool = True
    api_key: str | None = None

    def __post_init__(self) -> None:
        times = (self.seconds, self.timeout_s, self.burst_every_s)
        if (
            not all(0 < time < math.inf for time in times)
            or self.concurrency < 1
            or min(self.burst, self.num_checked) < 0
        ):
            raise DSparkError(
                "a soak run needs positive times of load, to a timeout and between bursts, at least 1 client and no "
                f"negative counts, not {', '.join(f'{time:g} s' for time in times)}, {self.concurrency}, {self.burst} "
                f"and {self.num_checked}"
            )


class Judge(Protocol):
    """Compares an answer with the truth."""

    def judge(self, outcome: Outcome, prompt_ids: Sequence[int]) -> Verdict:
        """The verdict on one answer."""
        ...


def run_soak(
    target: Target,
    settings: SoakSettings,
    judge: Callable[[int], Judge],
    *,
    server: Server | None = None,
    on_second: Callable[[float, str], None] = lambda seconds, text: None,
) -> SoakReport:
    """Load a server, watch it, let it come to rest, and judge.

    Args:
        target: the server.
        settings: how hard and how long.
        judge: makes the oracle, given max_model_len; called after the load, so that it takes none of its time.
        server: its process, if it is ours.
        on_second: told how far the run is.

    Returns:
        The report; after Ctrl-C that of the load so far.

    Raises:
        DSparkError: the server does not answer, or lacks what a soak run needs.
    """
    log = SoakLog(Reservoir(max(1, settings.num_checked // 12), settings.seed))
    run = _Run(target, settings, log, server, on_second)
    is_interrupted = False
    try:
        asyncio.run(run.load())
    except KeyboardInterrupt:
        if not log.samples:
            raise
        is_interrupted = True
    asyncio.run(run.rest())
    verdicts = _judge(run, judge, on_second)
    memory = trend_of(log.samples, lambda sample: sample.rss_bytes, settings.warmup_share * settings.seconds)
    return SoakReport(
        settings={name: value for name, value in asdict(settings).items() if name != "api_key"},
        model=run.model,
        machine=describe_machine(torch.device("cpu")),
        log=log,
        memory=memory,
        verdicts=verdicts,
        violations=tuple(violations_of(log, memory, verdicts, server)),
        is_interrupted=is_interrupted,
    )


class _Run:
    """The load and the watch."""

    def __init__(
        self,
        target: Target,
        settings: SoakSettings,
        log: SoakLog,
        server: Server | None,
        on_second: Callable[[float, str], None],
    ) -> None:
        self._target, self._settings, self.log = target, settings, log
        self._server, self._on_second = server, on_second
        self._numbers = count()
        self._began = 0.0
        self.model = target.model or ""
        self.max_model_len = 0

    async def load(self) -> None:
        """Play acts until the time is up."""
        watcher = await open_client(self._target, self._settings.timeout_s, self._settings.api_key)
        client = SoakClient(watcher.url, self._settings.timeout_s, self._settings.api_key)
        try:
            mix = await self._make_mix(watcher)
            self.log.before = await self._look(watcher)
            await self._play(mix, client, watcher)
        finally:
            await client.close()
            await watcher.close()

    async def _play(self, mix: Mix, client: SoakClient, watcher: ServeClient) -> None:
        self._began = time.perf_counter()
        until = self._began + self._settings.seconds
        watching = asyncio.create_task(self._watch(watcher))
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(self._settings.concurrency):
                    clients.create_task(self._client(mix, client, until))
                if self._settings.burst:
                    clients.create_task(self._bursts(mix, client, until))
        finally:
            self.log.load_s = time.perf_counter() - self._began
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _client(self, mix: Mix, client: SoakClient, until: float) -> None:
        while time.perf_counter() < until:
            self.log.take(await client.play(mix.act(next(self._numbers))))

    async def _bursts(self, mix: Mix, client: SoakClient, until: float) -> None:
        while (left := until - time.perf_counter()) > 0:
            await asyncio.sleep(min(self._settings.burst_every_s, left))
            acts = [mix.act(next(self._numbers)) for _ in range(self._settings.burst)]
            for outcome in await asyncio.gather(*(client.play(act) for act in acts)):
                self.log.take(outcome)

    async def _watch(self, watcher: ServeClient) -> None:
        for second in count():
            await asyncio.sleep(self._began + second * _SAMPLE_EVERY_S - time.perf_counter())
            sample = await self._look(watcher)
            self.log.samples.append(sample)
            self._on_second(sample.at_s, f"{sum(self.log.results.values())} requests")

    async def _look(self, watcher: ServeClient) -> Sample:
        pid = None if self._server is None else self._server.pid
        engine = await watcher.get_text("/debug/engine")
        metrics = await watcher.get_text("/metrics") if pid is None else None
        return read_sample(time.perf_counter() - self._began if self._began else 0.0, pid, engine, metrics)

    async def _make_mix(self, watcher: ServeClient) -> Mix:
        self.model = watcher.model
        if not watcher.wants_token_ids:
            raise DSparkError(f"{watcher.url} has no /debug/engine: a soak run needs a server of this package")
        self.max_model_len = _max_model_len(await watcher.get_text("/v1/models"), watcher.url)
        prompts = load_prompts()
        texts = [prompt.text for prompt in prompts if prompt.text is not None]
        status, answer = await watcher.post("/tokenize", {"prompt": "\n".join(texts)})
        if status != 200:
            raise DSparkError(f"{watcher.url} answers /tokenize with status {status}")
        dialogues = [prompt.messages for prompt in prompts if prompt.messages]
        can_chat = (await watcher.post("/tokenize", {"messages": list(dialogues[0])}))[0] == 200
        return Mix(
            MixSettings(
                seed=self._settings.seed,
                vocabulary=sorted(set(answer["tokens"])),
                max_model_len=self.max_model_len,
                texts=[text for text in texts if len(text) < self.max_model_len],
                model=watcher.model,
                max_body_bytes=self._settings.max_body_bytes,
                dialogues=dialogues if can_chat else (),
                has_structured=self._settings.has_structured,
            )
        )

    async def rest(self) -> None:
        """Wait until the server is idle, and fetch what the oracle needs of it."""
        log = self.log
        with suppress(DSparkError):  # a server that does not answer any more is a violation, not a mistake of the user
            watcher = await open_client(self._target, self._settings.timeout_s, self._settings.api_key)
            try:
                until = time.perf_counter() + _REST_S
                while time.perf_counter() < until:
                    sample = await self._look(watcher)
                    if sample.is_idle and not sample.num_held_pages:
                        break
                    await asyncio.sleep(_SAMPLE_EVERY_S)
                await asyncio.sleep(_SAMPLE_EVERY_S)
                log.at_rest = await self._look(watcher)
                log.health = await watcher.get_text("/health") or ""
                for outcome in log.reservoir.outcomes:
                    log.prompts[outcome.act.number] = await _prompt_ids(watcher, outcome)
            finally:
                await watcher.close()


async def _prompt_ids(watcher: ServeClient, outcome: Outcome) -> list[int]:
    """Token ids of an act's prompt; empty when the server cannot tell."""
    body = outcome.act.body
    assert not isinstance(body, bytes)
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    asked = {"prompt": prompt} if prompt is not None else {"messages": body["messages"]}
    status, answer = await watcher.post("/tokenize", asked)
    return list(answer["tokens"]) if status == 200 else []


def _max_model_len(listed: str | None, url: str) -> int:
    try:
        return int(json.loads(listed or "")["data"][0]["max_model_len"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise DSparkError(f"{url} does not list max_model_len at /v1/models") from error


def _judge(run: _Run, judge: Callable[[int], Judge], on_second: Callable[[float, str], None]) -> tuple[Verdict, ...]:
    log = run.log
    outcomes = [outcome for outcome in log.reservoir.outcomes if log.prompts.get(outcome.act.number)]
    if not outcomes:
        return ()
    oracle = judge(run.max_model_len)
    verdicts = []
    for number, outcome in enumerate(outcomes, start=1):
        verdicts.append(oracle.judge(outcome, log.prompts[outcome.act.number]))
        on_second(log.load_s, f"{number} of {len(outcomes)} answers compared")
    return tuple(verdicts)
