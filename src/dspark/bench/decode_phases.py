"""Where the time of a step goes: the target's pass, the draft's, sampling, and what is left for the host.

The engine marks its own phases (`dspark.engine.stopwatch`); on an accelerator a mark is an event in the stream. The
target's time is that of its pass, sampling lasts from the end of that pass to the verdict, the draft's time is that of
its passes. A round on the device is launched in its parts while it is measured, and as few launches otherwise. The
Markov loop of blocks that are drawn token by token from the host counts for the host.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dspark.engine.stopwatch import Phase, Stopwatch

# Steps that capture the parts of a round before they are measured.
EXTRA_STEPS = 3


@dataclass(frozen=True)
class Phases:
    """Mean milliseconds of a step."""

    target: float
    draft: float
    sampling: float
    host: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(asdict(self).values())


class PhaseClock:
    """Listens to an engine's stopwatch.

    Args:
        stopwatch: the engine's.
        device: where it runs.
    """

    def __init__(self, stopwatch: Stopwatch, device: torch.device) -> None:
        self._stopwatch = stopwatch
        self._is_cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._wall_ms = 0.0
        self._num_steps = 0

    def measure(self, step: Callable[[], object], num_steps: int) -> None:
        """Run so many steps, after a few more that capture the parts of a round."""
        self._stopwatch.listener = self
        try:
            for _ in range(EXTRA_STEPS):
                step()
            self._wait()
            self._spans.clear()
            began = time.perf_counter()
            for _ in range(num_steps):
                step()
            self._wait()
        finally:
            self._stopwatch.listener = None
        self._wall_ms += 1e3 * (time.perf_counter() - began)
        self._num_steps += num_steps

    def phases(self) -> Phases:
        """Means over all steps."""
        sums = {phase: sum(self._elapsed_ms(*span) for span in spans) for phase, spans in self._spans.items()}
        means = {phase: sums.get(phase, 0.0) / self._num_steps for phase in ("target", "draft", "sampling")}
        return Phases(**means, host=self._wall_ms / self._num_steps - sum(means.values()))

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """See `PhaseListener.phase`."""
        began = self._mark()
        yield
        self._spans[name].append((began, self._mark()))

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_ms(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) if self._is_cuda else 1e3 * (ended - began)
