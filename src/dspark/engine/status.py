"""What an engine says of itself: plain numbers, taken between two steps."""

from dataclasses import asdict, dataclass, field
from typing import Any

from dspark.engine.memory import MemoryPlan
from dspark.speculative.health import HealthCounts
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.state.prefix_cache import PrefixStatistics


@dataclass(frozen=True)
class LoopStatus:
    """An engine between two steps.

    Attributes:
        num_running, num_waiting: requests with state, and without.
        num_pages, num_free_pages, num_cached_pages: pages in all, held by nobody, and held by the prefix cache only.
        num_steps, num_preemptions: since the start.
        last_step_rows, last_verify_rows: rows of the last target pass, and how many of them were drafts.
        prefix: counts of the prefix cache.
        speculation: "running", or "not running because ...".
        acceptance: all rounds since the start.
        draft_health: how often drafting was given up and tried again.
        memory: who holds what; None where nobody counted.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_steps: int
    num_preemptions: int
    last_step_rows: int
    last_verify_rows: int
    prefix: PrefixStatistics
    speculation: str
    acceptance: AcceptanceStatistics
    draft_health: HealthCounts = field(default_factory=HealthCounts)
    memory: MemoryPlan | None = None

    @property
    def page_usage(self) -> float:
        """Share of the pages that running requests hold, in [0, 1]."""
        return 1.0 - (self.num_free_pages + self.num_cached_pages) / self.num_pages

    def to_dict(self) -> dict[str, Any]:
        """Plain form for JSON."""
        memory = self.memory.as_json() if self.memory else None
        return {
            **asdict(self),
            "page_usage": self.page_usage,
            "acceptance": self.acceptance.to_dict(),
            "memory": memory,
        }
