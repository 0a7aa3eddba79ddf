"""What a soak run has seen, and what of it must not be."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from dspark.bench.soak_client import Outcome
from dspark.bench.soak_mix import OK
from dspark.bench.soak_oracle import Reservoir, Verdict
from dspark.bench.soak_watch import Sample, Trend, columns_of

SCHEMA = "dspark.bench.soak/1"
_KEPT_FAILURES = 20
# Connections of the watching client and the server's own; a leak adds one for each request or each disconnect.
_SPARE_FILES = 16


class Server(Protocol):
    """The process under load, where this machine runs it."""

    num_tracebacks: int

    @property
    def pid(self) -> int:
        """Of the process."""
        ...

    def is_alive(self) -> bool:
        """Is it still there?"""
        ...


@dataclass
class SoakLog:
    """What has happened so far."""

    reservoir: Reservoir
    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[Outcome] = field(default_factory=list)
    num_wrong: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    slowest_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None
    at_rest: Sample | None = None
    prompts: dict[int, list[int]] = field(default_factory=dict)
    load_s: float = 0.0
    health: str = ""

    def take(self, outcome: Outcome) -> None:
        """Count an outcome, and keep what is wrong or is to be compared."""
        self.results[outcome.act.kind, outcome.result] += 1
        self.num_prompt_tokens += outcome.num_prompt_tokens
        self.num_tokens += outcome.num_tokens
        self.num_cached_tokens += outcome.num_cached_tokens
        self.slowest_s = max(self.slowest_s, outcome.seconds)
        if not outcome.is_right:
            self.num_wrong += 1
            self.wrong += [outcome] if len(self.wrong) < _KEPT_FAILURES else []
        elif outcome.act.is_comparable and outcome.result == OK:
            self.reservoir.offer(outcome)


@dataclass(frozen=True)
class SoakReport:
    """The whole run; `violations` is empty when all is well."""

    settings: dict[str, Any]
    model: str
    machine: dict[str, Any]
    log: SoakLog
    memory: Trend | None
    verdicts: tuple[Verdict, ...]
    violations: tuple[str, ...]
    is_interrupted: bool

    @property
    def num_requests(self) -> int:
        """That came to an end of any kind."""
        return sum(self.log.results.values())

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        log = self.log
        kinds: dict[str, dict[str, int]] = {}
        for (kind, result), number in sorted(log.results.items()):
            kinds.setdefault(kind, {})[result] = number
        return {
            "schema": SCHEMA,
            "model": self.model,
            "machine": self.machine,
            "settings": self.settings,
            "interrupted": self.is_interrupted,
            "violations": list(self.violations),
            "load_s": log.load_s,
            "requests": self.num_requests,
            "results": kinds,
            "prompt_tokens": log.num_prompt_tokens,
            "completion_tokens": log.num_tokens,
            "cached_tokens": log.num_cached_tokens,
            "slowest_s": log.slowest_s,
            "memory": None if self.memory is None else {**asdict(self.memory), "is_flat": self.memory.is_flat},
            "compared": [asdict(verdict) for verdict in self.verdicts],
            "wrong": [_outcome_json(outcome) for outcome in log.wrong],
            "before": None if log.before is None else asdict(log.before),
            "at_rest": None if log.at_rest is None else asdict(log.at_rest),
            "samples": columns_of(log.samples),
        }


def violations_of(log: SoakLog, memory: Trend | None, verdicts: Sequence[Verdict], server: Server | None) -> list[str]:
    """What must not be, in sentences."""
    found = []
    if log.num_wrong:
        kinds = Counter(f"{outcome.act.kind}: {outcome.result}" for outcome in log.wrong)
        named = ", ".join(f"{number} x {kind}" for kind, number in kinds.most_common(5))
        found.append(f"{log.num_wrong} requests had another outcome than they should ({named})")
    found += [f"{v.kind} {v.number}: {v.difference}" for v in verdicts if v.difference]
    if not verdicts:
        found.append("no answer could be compared with the oracle")
    if memory is not None and not memory.is_flat:
        low, high = (value / 2**20 for value in memory.interval)
        found.append(f"the server's memory grew by {low:.1f} to {high:.1f} MiB in {memory.stretch_s:.0f} s")
    if server is not None:
        found += [] if server.is_alive() else ["the server has ended"]
        found += [f"the server printed {server.num_tracebacks} tracebacks"] if server.num_tracebacks else []
    return found + _left_over(log)


def _left_over(log: SoakLog) -> list[str]:
    """What a server at rest must not hold."""
    rest, before = log.at_rest, log.before
    if rest is None:
        return ["the server did not answer after the load"]
    found = []
    if not rest.is_idle:
        found.append(f"{rest.num_running} requests run and {rest.num_waiting} wait though no client is left")
    if rest.num_held_pages:
        found.append(f"{rest.num_held_pages} pages are held by nobody")
    if rest.num_held_pages is None:
        found.append("the server does not say what pages it holds")
    if before is not None and rest.num_files is not None and before.num_files is not None:
        more = rest.num_files - before.num_files
        found += [f"{more} more files are open than before the load"] if more > _SPARE_FILES else []
    if '"dead"' in log.health or not log.health:
        found.append(f"the server is not healthy after the load: {log.health[:200] or 'no answer'}")
    return found


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    body = outcome.act.body
    return {
        "number": outcome.act.number,
        "kind": outcome.act.kind,
        "result": outcome.result,
        "expected": sorted(outcome.act.expected),
        "message": outcome.message,
        "seconds": outcome.seconds,
        "path": outcome.act.path,
        "body": repr(body[:200]) if isinstance(body, bytes) else dict(body),
    }
