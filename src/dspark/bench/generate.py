"""Plain decoding against DSpark in one run, prompt by prompt in ABAB order, with the tokens of both compared."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch

from dspark.bench.memory import measure_peak
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine.machine import describe_machine
from dspark.speculative.statistics import AcceptanceStatistics

SCHEMA = "dspark.bench.generate/1"
# Enough for lazily built tables and allocator pools of both a prefill and several rounds.
WARMUP_TOKENS = 12
MODES = ("plain", "dspark")


class Answer(Protocol):
    """What the benchmark reads of a completion."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The emitted tokens."""
        ...

    @property
    def statistics(self) -> AcceptanceStatistics:
        """The rounds that emitted them."""
        ...


class Generator(Protocol):
    """An engine in one mode."""

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> Sequence[Answer]:
        """Complete prompts given as token ids."""
        ...


@dataclass(frozen=True)
class Item:
    """One prompt as token ids."""

    domain: str
    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Measurement:
    """One prompt in both modes.

    Args:
        num_tokens: tokens emitted by one run.
        seconds: by mode, one entry a repeat, prefill included.
        peak_bytes: by mode, the highest of all repeats.
        statistics: of one DSpark run; the others repeat it.
        first_difference: index of the first token in which any run differs from the first plain one; None if none.
        is_peak_exact: False where `peak_bytes` includes earlier work.
    """

    item: Item
    num_tokens: int
    seconds: dict[str, tuple[float, ...]]
    peak_bytes: dict[str, int]
    statistics: AcceptanceStatistics
    first_difference: int | None
    is_peak_exact: bool


@dataclass(frozen=True)
class Row:
    """The figures of one domain, or of all.

    Args:
        ratio: DSpark's speed over plain's.
        accepted_len, accepted_len_interval: mean tokens of a round and its 95 % interval.
        acceptance: [G] share of rounds in which draft position k was accepted, given that 1..k-1 were; None where
            no round got that far.
        wasted_rows: share of target rows spent on drafts that were rejected.
        num_different: prompts whose tokens were not the same in every run.
    """

    name: str
    num_prompts: int
    num_tokens: int
    plain_tokens_per_second: float
    dspark_tokens_per_second: float
    ratio: float
    accepted_len: float
    accepted_len_interval: tuple[float, float]
    acceptance: tuple[float | None, ...]
    wasted_rows: float
    num_different: int


@dataclass(frozen=True)
class GenerateReport:
    """The whole benchmark."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    domains: tuple[Row, ...]
    total: Row
    peak_bytes: dict[str, int]
    is_peak_exact: bool
    measurements: tuple[Measurement, ...]
    is_interrupted: bool = False

    @property
    def is_identical(self) -> bool:
        """Did every run of every prompt emit the same tokens?"""
        return self.total.num_different == 0

    def as_json(self) -> dict[str, Any]:
        """For programs; every figure of the table and what it was computed from."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "machine": self.machine,
            "settings": self.settings,
            "interrupted": self.is_interrupted,
            "identical": self.is_identical,
            "peak_bytes": self.peak_bytes,
            "peak_is_exact": self.is_peak_exact,
            "total": asdict(self.total),
            "domains": [asdict(row) for row in self.domains],
            "prompts": [_prompt_json(measurement) for measurement in self.measurements],
        }


def run_generate_bench(
    plain: Generator,
    drafted: Generator,
    items: Sequence[Item],
    params: SamplingParams,
    *,
    model: str,
    device: torch.device,
    repeats: int = 2,
    on_prompt: Callable[[Measurement], None] = lambda measurement: None,
) -> GenerateReport:
    """Measure both modes on every prompt.

    The order within a prompt is plain, DSpark, plain, DSpark ..., so that a machine that slows down or speeds up
    meets both alike. One short run of each mode comes first and is not counted.

    Args:
        plain, drafted: the same model without and with speculation.
        items: prompts, grouped by domain.
        params: sampling; the same for both modes.
        model: its name in the report.
        device: where the engines run; says which memory is measured.
        repeats: runs of each mode for each prompt, >= 1.
        on_prompt: called after each prompt.

    Returns:
        The figures; after Ctrl-C those of the prompts that were finished.

    Raises:
        DSparkError: there is no prompt, or repeats is below 1.
    """
    if not items or repeats < 1:
        raise DSparkError(f"a benchmark needs a prompt and a repeat, not {len(items)} and {repeats}")
    engines = {"plain": plain, "dspark": drafted}
    warmup = replace(params, max_tokens=min(WARMUP_TOKENS, params.max_tokens))
    for engine in engines.values():
        engine.generate([list(items[0].token_ids)], warmup)
    measurements: list[Measurement] = []
    try:
        for item in items:
            measurements.append(_measure(engines, item, params, device, repeats))
            on_prompt(measurements[-1])
    except KeyboardInterrupt:
        if not measurements:
            raise
    return GenerateReport(
        model=model,
        machine=describe_machine(device),
        settings={"repeats": repeats, **asdict(params)},
        domains=tuple(summarise(domain, list(group)) for domain, group in groupby(measurements, _domain)),
        total=summarise("all", measurements),
        peak_bytes={mode: max(m.peak_bytes[mode] for m in measurements) for mode in MODES},
        is_peak_exact=all(m.is_peak_exact for m in measurements),
        measurements=tuple(measurements),
        is_interrupted=len(measurements) < len(items),
    )


def _domain(measurement: Measurement) -> str:
    return measurement.item.domain


def _measure(
    engines: dict[str, Generator], item: Item, params: SamplingParams, device: torch.device, repeats: int
) -> Measurement:
    """Run one prompt `repeats` times in each mode, alternating."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    peaks: dict[str, int] = dict.fromkeys(MODES, 0)
    outputs: list[list[int]] = []
    statistics = None
    exact = True
    for _ in range(repeats):
        for mode, engine in engines.items():
            with measure_peak(device) as peak:
                started = time.perf_counter()
                (answer,) = engine.generate([list(item.token_ids)], params)
                seconds[mode].append(time.perf_counter() - started)
            peaks[mode] = max(peaks[mode], peak.peak_bytes)
            exact &= peak.is_exact
            outputs.append(list(answer.token_ids))
            statistics = answer.statistics
    assert statistics is not None  # the last run of a repeat is a DSpark run, and there is at least one repeat
    differences = [place for output in outputs if (place := first_difference(outputs[0], output)) is not None]
    return Measurement(
        item=item,
        num_tokens=len(outputs[0]),
        seconds={mode: tuple(times) for mode, times in seconds.items()},
        peak_bytes=peaks,
        statistics=statistics,
        first_difference=min(differences, default=None),
        is_peak_exact=exact,
    )


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None when both are the same."""
    for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def summarise(name: str, measurements: Sequence[Measurement]) -> Row:
    """Sum times, tokens and rounds over prompts; a long output weighs more than a short one."""
    runs = len(measurements[0].seconds["plain"])
    num_tokens = sum(m.num_tokens for m in measurements)
    plain = sum(sum(m.seconds["plain"]) for m in measurements)
    dspark = sum(sum(m.seconds["dspark"]) for m in measurements)
    rounds = AcceptanceStatistics(measurements[0].statistics.block_size)
    for measurement in measurements:
        rounds.merge(measurement.statistics)
    accepted = rounds.accepted_len()
    mean = accepted.value if accepted.value is not None else 1.0
    return Row(
        name=name,
        num_prompts=len(measurements),
        num_tokens=num_tokens,
        plain_tokens_per_second=runs * num_tokens / plain,
        dspark_tokens_per_second=runs * num_tokens / dspark,
        ratio=plain / dspark,
        accepted_len=mean,
        accepted_len_interval=(_or(accepted.low, mean), _or(accepted.high, mean)),
        acceptance=tuple(rounds.conditional(k).value for k in range(1, rounds.block_size + 1)),
        wasted_rows=_or(rounds.wasted_rows().value, 0.0),
        num_different=sum(m.first_difference is not None for m in measurements),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _prompt_json(measurement: Measurement) -> dict[str, Any]:
    return {
        "name": measurement.item.name,
        "domain": measurement.item.domain,
        "prompt_tokens": len(measurement.item.token_ids),
        "tokens": measurement.num_tokens,
        "seconds": measurement.seconds,
        "peak_bytes": measurement.peak_bytes,
        "first_difference": measurement.first_difference,
        "statistics": measurement.statistics.to_dict(),
    }
