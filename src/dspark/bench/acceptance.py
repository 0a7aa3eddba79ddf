"""How much of what a drafter proposes is accepted, by domain and sampler, and beside baselines on the same prompts."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch

from dspark.bench.bootstrap import Interval, ratio_interval
from dspark.bench.generate import Item
from dspark.bench.rounds import AcceptanceRow, PromptRounds, keep_round, summarise_rounds
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplerName, SamplingParams
from dspark.engine.machine import describe_machine
from dspark.engine.observer import RoundObserver, RoundRecord
from dspark.scheduler.plan import RequestId

SCHEMA = "dspark.bench.acceptance/1"
ALL = "all"
# Prompts in one call of the engine: their company saves time and does not change their tokens.
_PROMPTS_PER_CALL = 8


class Answer(Protocol):
    """What the benchmark reads of a completion."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The emitted tokens."""
        ...

    @property
    def request_id(self) -> RequestId:
        """The key of its rounds."""
        ...


class ObservedGenerator(Protocol):
    """An engine that speculates and can be watched."""

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> Sequence[Answer]:
        """Complete prompts given as token ids."""
        ...

    def observe_rounds(self, observer: RoundObserver | None) -> None:
        """Tell an observer of every round."""
        ...


@dataclass(frozen=True)
class Drafter:
    """A model with its draft under a name.

    Attributes:
        name: unique in a report.
        engine: runs it.
        block_size: drafts of a round.
    """

    name: str
    engine: ObservedGenerator
    block_size: int


@dataclass(frozen=True)
class Setting:
    """One way of drawing tokens."""

    temperature: float
    sampler: SamplerName

    @property
    def name(self) -> str:
        """Short form for tables; at temperature 0 both samplers take the most likely token."""
        return "T=0" if self.temperature == 0 else f"T={self.temperature:g} {self.sampler}"


@dataclass(frozen=True)
class Run:
    """One drafter under one setting: its prompts, and rows for the domains and for all."""

    drafter: str
    setting: Setting
    block_size: int
    prompts: tuple[PromptRounds, ...]
    rows: tuple[AcceptanceRow, ...]


@dataclass(frozen=True)
class Gain:
    """Accepted length over a baseline's on the same prompts; 1.1 is 10 % more.

    Attributes:
        ratio, interval: None without rounds; the interval is 95 %, prompts resampled.
        num_different: prompts whose tokens differ between the two; never under the keyed sampler with one target.
    """

    baseline: str
    setting: Setting
    domain: str
    ratio: float | None
    interval: Interval | None
    num_different: int

    def as_json(self) -> dict[str, Any]:
        """For programs; [ratio, low, high] to four digits."""
        values = (self.ratio, *(self.interval or (None, None)))
        return {
            "baseline": self.baseline,
            "setting": self.setting.name,
            "domain": self.domain,
            "ratio": [None if value is None else round(value, 4) for value in values],
            "different_prompts": self.num_different,
        }


@dataclass(frozen=True)
class AcceptanceReport:
    """The whole benchmark: runs by setting, the first drafter of each setting being the one that is measured."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    runs: tuple[Run, ...]
    gains: tuple[Gain, ...]
    is_interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """For programs; every figure of the tables with its counts."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "machine": self.machine,
            "settings": self.settings,
            "interrupted": self.is_interrupted,
            "runs": [
                {
                    "drafter": run.drafter,
                    "setting": run.setting.name,
                    "block_size": run.block_size,
                    "rows": [row.as_json() for row in run.rows],
                }
                for run in self.runs
            ],
            "gains": [gain.as_json() for gain in self.gains],
        }


def settings_for(temperatures: Sequence[float], samplers: Sequence[SamplerName]) -> list[Setting]:
    """Every temperature with every sampler; temperature 0 once, as the samplers do not differ there."""
    if not temperatures or not samplers:
        raise DSparkError("at least one temperature and one sampler are needed")
    settings = [Setting(temperature, sampler) for temperature in temperatures for sampler in samplers]
    unique = {setting.name: setting for setting in settings}
    return list(unique.values())


def run_acceptance_bench(
    drafters: Sequence[Drafter],
    items: Sequence[Item],
    settings: Sequence[Setting],
    params: SamplingParams,
    *,
    model: str,
    device: torch.device,
    on_prompt: Callable[[], None] = lambda: None,
) -> AcceptanceReport:
    """Watch every drafter on every prompt under every setting.

    A round counts if it begins before `params.max_tokens` tokens are out, and then whole: outputs may run one block
    longer, so that no round is cut by the limit. Drafts behind a stop token count as not accepted.

    Args:
        drafters: the measured one, then baselines.
        items: prompts, grouped by domain.
        settings: see `settings_for`.
        params: sampling; temperature and sampler are replaced.
        model: the measured drafter's name for people.
        device: where the engines run.
        on_prompt: called after each prompt of each run.

    Returns:
        The figures; after Ctrl-C those of the runs that were finished.

    Raises:
        DSparkError: there is no prompt, or two drafters have one name.
    """
    names = [drafter.name for drafter in drafters]
    if not items or len(set(names)) < len(names):
        raise DSparkError(f"the benchmark needs a prompt and drafters of different names, not {len(items)} and {names}")
    runs: list[Run] = []
    is_interrupted = False
    try:
        for setting in settings:
            for drafter in drafters:
                runs.append(_run(drafter, items, setting, params, on_prompt))
    except KeyboardInterrupt:
        if not runs:
            raise
        is_interrupted = True
    return AcceptanceReport(
        model=model,
        machine=describe_machine(device),
        settings={**asdict(params), "temperature": None, "sampler": None, "prompts": len(items)},
        runs=tuple(runs),
        gains=tuple(_gains(runs)),
        is_interrupted=is_interrupted,
    )


class _RoundLog:
    """Keeps rounds by request."""

    def __init__(self) -> None:
        self.records: defaultdict[RequestId, list[RoundRecord]] = defaultdict(list)

    def observe(self, record: RoundRecord) -> None:
        self.records[record.request_id].append(record)


def _run(
    drafter: Drafter, items: Sequence[Item], setting: Setting, params: SamplingParams, on_prompt: Callable[[], None]
) -> Run:
    measured: list[PromptRounds] = []
    for first in range(0, len(items), _PROMPTS_PER_CALL):
        for prompt in _watch(drafter, items[first : first + _PROMPTS_PER_CALL], setting, params):
            measured.append(prompt)
            on_prompt()
    rows = [
        summarise_rounds(domain, list(group), drafter.block_size)
        for domain, group in groupby(measured, lambda prompt: prompt.item.domain)
    ]
    rows.append(summarise_rounds(ALL, measured, drafter.block_size))
    return Run(drafter.name, setting, drafter.block_size, tuple(measured), tuple(rows))


def _watch(drafter: Drafter, items: Sequence[Item], setting: Setting, params: SamplingParams) -> list[PromptRounds]:
    """Generate some outputs together and keep their rounds."""
    whole = replace(
        params,
        temperature=setting.temperature,
        sampler=setting.sampler,
        max_tokens=params.max_tokens + drafter.block_size,
    )
    log = _RoundLog()
    drafter.engine.observe_rounds(log)
    try:
        answers = drafter.engine.generate([list(item.token_ids) for item in items], whole)
    finally:
        drafter.engine.observe_rounds(None)
    return [
        _keep(item, answer, log.records[answer.request_id], params.max_tokens)
        for item, answer in zip(items, answers, strict=True)
    ]


def _keep(item: Item, answer: Answer, records: Sequence[RoundRecord], max_tokens: int) -> PromptRounds:
    """The rounds that begin before `max_tokens` tokens are out.

    With a prompt of 10 tokens and max_tokens 4, outputs stand at positions 10..13; a round that begins with the anchor
    at 12 has 3 tokens out and still counts, so the last anchor is 10 + 4 - 2.
    """
    last_anchor = len(item.token_ids) + max_tokens - 2
    counted = [record for record in records if record.anchor_position <= last_anchor]
    return PromptRounds(item, tuple(answer.token_ids[:max_tokens]), tuple(map(keep_round, counted)))


def _gains(runs: Sequence[Run]) -> Iterator[Gain]:
    """Compare the first drafter of each setting with those after it that propose blocks of the same size."""
    for _, group in groupby(runs, lambda run: run.setting):
        measured, *baselines = group
        for baseline in baselines:
            if baseline.block_size == measured.block_size:
                yield from _gain_rows(measured, baseline)


def _gain_rows(measured: Run, baseline: Run) -> Iterator[Gain]:
    for domain in (row.name for row in measured.rows):
        ours, theirs = _prompts_of(measured, domain), _prompts_of(baseline, domain)
        means = [_mean(prompts) for prompts in (ours, theirs)]
        yield Gain(
            baseline=baseline.drafter,
            setting=measured.setting,
            domain=domain,
            ratio=None if means[0] is None or means[1] is None else means[0] / means[1],
            interval=ratio_interval([p.counts for p in ours], [p.counts for p in theirs]),
            num_different=sum(a.token_ids != b.token_ids for a, b in zip(ours, theirs, strict=True)),
        )


def _prompts_of(run: Run, domain: str) -> list[PromptRounds]:
    return [prompt for prompt in run.prompts if domain in (ALL, prompt.item.domain)]


def _mean(prompts: Sequence[PromptRounds]) -> float | None:
    tokens, rounds = (sum(column) for column in zip(*(prompt.counts for prompt in prompts), strict=True))
    return tokens / rounds if rounds else None
