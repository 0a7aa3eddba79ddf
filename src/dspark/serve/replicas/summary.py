"""One status of several engines: sums of their numbers, and the worst of their states."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from dspark.engine.async_engine import EngineState, EngineStatus
from dspark.engine.speculation import RUNNING
from dspark.engine.status import LoopStatus
from dspark.speculative.health import HealthCounts
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.state.prefix_cache import PrefixStatistics

Counts = TypeVar("Counts", PrefixStatistics, HealthCounts)


def summary_of(
    known: Mapping[int, EngineStatus], down: Mapping[int, str], is_draining: bool, num_requests: int
) -> EngineStatus:
    """The status of a fleet.

    Args:
        known: last status of each replica that ever answered.
        down: why replicas are down.
        is_draining: no more requests are taken.
        num_requests: of all replicas, as the fleet counts them.
    """
    up = [status for number, status in known.items() if number not in down]
    state, reason = _state(known, down, up, is_draining)
    return EngineStatus(state, reason, num_requests, _sum_of([status.loop for status in up or known.values()]))


def _state(
    known: Mapping[int, EngineStatus], down: Mapping[int, str], up: Sequence[EngineStatus], is_draining: bool
) -> tuple[EngineState, str | None]:
    if is_draining:
        return "draining", "the engine is shutting down and takes no more requests"
    if not up:
        return "dead", "no replica is up: " + "; ".join(dict.fromkeys(down.values()))
    if down:
        listed = ", ".join(f"replica {number}: {reason}" for number, reason in sorted(down.items()))
        return "degraded", f"{len(down)} of {len({*known, *down})} replicas are down ({listed})"
    for status in up:
        if status.state == "degraded":
            return "degraded", status.reason
    return "ready", None


def _sum_of(loops: Sequence[LoopStatus]) -> LoopStatus:
    """Counts are added; speculation is what the first replica that does not draft says."""
    names = [item.name for item in fields(LoopStatus) if item.type is int]
    sums: dict[str, Any] = {name: sum(getattr(loop, name) for loop in loops) for name in names}
    acceptance = AcceptanceStatistics(max((loop.acceptance.block_size for loop in loops), default=0))
    for loop in loops:
        acceptance.merge(loop.acceptance)
    inactive = [loop.speculation for loop in loops if loop.speculation != RUNNING]
    return LoopStatus(
        **sums,
        prefix=_added(PrefixStatistics, [loop.prefix for loop in loops]),
        speculation=inactive[0] if inactive else RUNNING,
        acceptance=acceptance,
        draft_health=_added(HealthCounts, [loop.draft_health for loop in loops]),
    )


def _added(kind: type[Counts], counts: Sequence[Counts]) -> Counts:
    """Counts of the same things, field by field."""
    return kind(**{item.name: sum(getattr(one, item.name) for one in counts) for item in fields(kind)})
