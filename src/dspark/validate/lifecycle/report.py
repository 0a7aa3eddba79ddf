"""What a run of the validator found: plain data for programs, tables and lines for people."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.validate.lifecycle.probe import ProbeResult
from dspark.validate.lifecycle.scenarios.registry import ScenarioResult

SCHEMA = "dspark.validate.lifecycle/1"

# Events of the episodes that people want to see, in this order.
_SHOWN = (
    "requests",
    "finished",
    "tokens",
    "accepted drafts",
    "rounds with rejected drafts",
    "blocks compared",
    "ended inside a block",
    "steps with several requests",
    "preemptions",
    "preemptions by the engine",
    "aborts",
    "prompts with several samples",
    "cache hits",
    "evicted images",
)


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode in which a request was not as it is alone, or something broke.

    Attributes:
        episode: number.
        step: engine step at which it showed.
        message: the first difference.
        arrivals: places of the arrivals that are enough for it.
        replay: a command that shows it again.
        smallest: the episode cut down, with the requests spelt out.
    """

    subject: str
    episode: int
    step: int
    message: str
    arrivals: tuple[int, ...]
    replay: str
    smallest: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self)


@dataclass
class EpisodeCounts:
    """Random episodes of one model: how many, over how many engine steps, and what happened in them.

    Attributes:
        num_answers, num_oracle_steps: different requests decoded alone, and the steps that took; not part of
            `num_steps`.
    """

    subject: str
    num_episodes: int = 0
    num_steps: int = 0
    num_answers: int = 0
    num_oracle_steps: int = 0
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "events": dict(sorted(self.events.items()))}


@dataclass
class LifecycleReport:
    """Everything that one run found."""

    model: str
    seed: int
    machine: dict[str, Any]
    scenarios: list[ScenarioResult] = field(default_factory=list)
    probes: list[ProbeResult] = field(default_factory=list)
    episodes: list[EpisodeCounts] = field(default_factory=list)
    failures: list[EpisodeFailure] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether nothing was found."""
        passed = [result.is_ok for result in self.scenarios] + [probe.is_ok for probe in self.probes]
        return all(passed) and not self.failures

    @property
    def num_steps(self) -> int:
        """Engine steps of all random episodes."""
        return sum(counts.num_steps for counts in self.episodes)

    def as_json(self) -> dict[str, Any]:
        """Plain data for programs."""
        return {
            "schema": SCHEMA,
            "is_ok": self.is_ok,
            "model": self.model,
            "seed": self.seed,
            "machine": self.machine,
            "seconds": self.seconds,
            "num_steps": self.num_steps,
            "scenarios": [result.as_json() for result in self.scenarios],
            "probes": [result.as_json() for result in self.probes],
            "episodes": [counts.as_json() for counts in self.episodes],
            "failures": [failure.as_json() for failure in self.failures],
        }


def tables(report: LifecycleReport) -> list[Table]:
    """Scenarios, probes and episodes."""
    found = []
    if report.scenarios:
        found.append(_scenario_table(report.scenarios))
    if report.probes:
        found.append(_probe_table(report.probes))
    if report.episodes:
        found.append(_episode_table(report.episodes))
    return found


def lines(report: LifecycleReport) -> list[str]:
    """What is wrong, one sentence each with how to see it again; then the sum of it."""
    bad = [
        f"{each.name} on {each.subject}: {each.verdict}: {each.message}" for each in report.scenarios if not each.is_ok
    ]
    bad += [f"{probe.name}: {probe.message}" for probe in report.probes if not probe.is_ok]
    for failure in report.failures:
        bad.append(f"episode {failure.episode} on {failure.subject}, step {failure.step}: {failure.message}")
        bad.append(f"  again: {failure.replay}")
    verdict = "no mismatch" if report.is_ok else "FAILED"
    counted = ", ".join(f"{counts.num_steps} on {counts.subject}" for counts in report.episodes) or "none"
    return [*bad, f"{verdict}; {report.num_steps} random engine steps ({counted}) in {report.seconds:.0f} s"]


def _scenario_table(results: list[ScenarioResult]) -> Table:
    """One line a scenario, one column a model."""
    subjects = list(dict.fromkeys(result.subject for result in results))
    table = Table(title="scenarios", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("scenario")
    for subject in subjects:
        table.add_column(subject)
    by_place = {(result.name, result.subject): result for result in results}
    for name in dict.fromkeys(result.name for result in results):
        row = [by_place.get((name, subject)) for subject in subjects]
        is_ok = all(result.is_ok for result in row if result is not None)
        cells = ["-" if result is None else f"{result.verdict} {result.seconds:.1f} s" for result in row]
        table.add_row(name, *cells, style=None if is_ok else "red")
    return table


def _probe_table(results: list[ProbeResult]) -> Table:
    table = Table(title="probes", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("probe")
    table.add_column("compared", justify="right")
    table.add_column("verdict")
    for result in results:
        verdict = "ok" if result.is_ok else "FAILED"
        table.add_row(result.name, str(result.num_compared), f"{verdict}: {result.message}")
    return table


def _episode_table(episodes: list[EpisodeCounts]) -> Table:
    table = Table(title="random episodes", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for counts in episodes:
        table.add_column(counts.subject, justify="right")
    table.add_row("episodes", *(str(counts.num_episodes) for counts in episodes))
    table.add_row("engine steps", *(str(counts.num_steps) for counts in episodes))
    table.add_row("requests decoded alone", *(str(counts.num_answers) for counts in episodes))
    for event in _SHOWN:
        table.add_row(event, *(str(counts.events[event]) for counts in episodes))
    table.add_row("seconds", *(f"{counts.seconds:.0f}" for counts in episodes))
    return table
