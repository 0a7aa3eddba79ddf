"""Progress of a run from 0 to 1, in steps or wall-clock time, and the learning rate that follows it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dspark.config.errors import DSparkError

Decay = Literal["linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Factor of the learning rate: a rise over the first updates, then a hold and a decay over the progress.

    The rise counts updates and not time, because the first updates of a compiled model take a minute.

    Attributes:
        warmup_steps: updates in which the factor rises to 1.
        hold: share of the run before the decay.
        final: factor at the end.
        decay: how it falls from 1 to `final` over the rest.
    """

    warmup_steps: int = 100
    hold: float = 0.4
    final: float = 0.0
    decay: Decay = "linear"

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.hold < 1:
            raise DSparkError(
                f"warm-up of {self.warmup_steps} steps or hold of {self.hold}: the first must be at least 0, "
                "the second in [0, 1)"
            )

    def factor(self, progress: float, step: int) -> float:
        """Return the factor of the update `step` (from 0) at a progress in [0, 1]."""
        rise = min(1.0, (step + 1) / (self.warmup_steps + 1))
        into = min(1.0, max(0.0, (progress - self.hold) / (1 - self.hold)))
        shape = 1 - into if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * into))
        return rise * (self.final + (1 - self.final) * shape)


class RunClock:
    """How far a run is: the larger of its share of steps and its share of time.

    The time budget covers everything between the first step and the last file: `reserve` is subtracted for
    what follows the last step. Time spent before a resume counts.

    Args:
        max_steps: None for a run that only time ends.
        minutes: None for a run that only steps end. One of the two is needed.
        spent_s: seconds used by the run's earlier lives.
        now: monotonic seconds; tests pass their own.

    Raises:
        DSparkError: neither limit is given, or one is not positive.
    """

    def __init__(
        self,
        max_steps: int | None,
        minutes: float | None,
        spent_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_steps is None and minutes is None:
            raise DSparkError("a run needs --steps, --minutes or both")
        if (max_steps is not None and max_steps < 1) or (minutes is not None and not 0 < minutes < math.inf):
            raise DSparkError(f"--steps {max_steps} and --minutes {minutes} must be positive")
        self.max_steps = max_steps
        self.budget_s = None if minutes is None else minutes * 60
        self._now = now
        self._began = now() - spent_s
        self._reserve_s = 0.0
        self._high = 0.0

    def elapsed_s(self) -> float:
        """Return seconds since the first step of the run, over all its lives."""
        return self._now() - self._began

    def reserve(self, seconds: float) -> None:
        """Keep seconds free at the end of the budget, at most a quarter of it."""
        if self.budget_s is not None:
            self._reserve_s = min(seconds, 0.25 * self.budget_s)

    def progress(self, step: int) -> float:
        """Return the progress before a step, in [0, 1]; it never falls."""
        shares = [self._high]
        if self.max_steps is not None:
            shares.append(step / self.max_steps)
        if self.budget_s is not None:
            shares.append(self.elapsed_s() / (self.budget_s - self._reserve_s))
        self._high = min(1.0, max(shares))
        return self._high

    def remaining_s(self, progress: float) -> float | None:
        """Return an estimate of the seconds to the last step, None at the very beginning."""
        return None if progress <= 0 else self.elapsed_s() * (1 - progress) / progress
