"""What differs between the engines of a run, as plain data, and how the configuration spells it."""

from dataclasses import dataclass
from typing import Literal

from dspark.config import DSparkConfig, SpeculativeConfig
from dspark.config.speculative import DraftHealthConfig


@dataclass(frozen=True)
class EngineSettings:
    """What differs between the engines of a run.

    Attributes:
        num_speculative_tokens: 0 decodes plainly.
        threshold: least survival that is verified; None verifies every draft.
        lengths_seed: draws verify lengths at random; None leaves them to the threshold.
        health_window: rounds over which draft health looks; None drafts whatever it gains.
        health_floor: mean accepted length at which drafting goes on.
        runs_ahead: passes have the fixed shapes of graphs and rounds run ahead of the host, whatever the device; false
            leaves that to the device.
    """

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_num_pages: int | None = None
    num_speculative_tokens: int = 5
    threshold: float | None = None
    lengths_seed: int | None = None
    health_window: int | None = None
    health_floor: float = 1.7
    runs_ahead: bool = False
    enable_prefix_caching: bool = True
    prefix_cache_interval: int | None = None
    prefix_cache_bytes: int = 2**26

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """As the engine's configuration spells it."""
        if self.num_speculative_tokens == 0:
            return None
        schedule: Literal["fixed", "threshold"] = "fixed" if self.threshold is None else "threshold"
        lengths = DSparkConfig(schedule=schedule, draft_confidence_threshold=self.threshold)
        return SpeculativeConfig(
            num_speculative_tokens=self.num_speculative_tokens, dspark_config=lengths, draft_health=self.health
        )

    @property
    def health(self) -> DraftHealthConfig | None:
        """Rules so quick that drafting stops and starts again within one request."""
        if self.health_window is None:
            return None
        window, floor = self.health_window, self.health_floor
        return DraftHealthConfig(floor, floor, window, probe_after=6, probe_rounds=max(window // 2, 1))
