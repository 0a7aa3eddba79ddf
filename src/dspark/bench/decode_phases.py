"""Where the time of a step goes: the target's pass, the draft's, sampling, and what is left for the host.

The engine is the one that ships; its own methods and launches are stamped from outside while a clock is attached. On
an accelerator stamps are events in the stream: the target's time is that of its captured pass, sampling begins when
the target's kernels end and is over when the host knows the tokens, the draft's time is that of its captured passes.
Without graphs, whole methods are stamped, launches included.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dspark.engine.core import Engine


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
    """Stamps the parts of an engine's steps."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._is_cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._sums: dict[str, float] = defaultdict(float)
        self._wall_ms = 0.0
        self._num_steps = 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Stamp everything that runs inside."""
        seams = list(self._seams())
        for owner, name, phase in seams:
            setattr(owner, name, self._stamped(getattr(owner, name), phase))
        try:
            yield
        finally:
            for owner, name, _ in seams:
                delattr(owner, name)  # the method of the class is found again

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; its stamps are read when it is over."""
        began = time.perf_counter()
        yield
        self._wall_ms += 1e3 * (time.perf_counter() - began)
        self._num_steps += 1
        if self._is_cuda:
            torch.cuda.synchronize()
        for phase, spans in self._spans.items():
            self._sums[phase] += sum(self._elapsed_ms(*span) for span in spans)
        self._spans.clear()

    def phases(self) -> Phases:
        """Means over all steps."""
        means = {phase: self._sums[phase] / self._num_steps for phase in ("target", "draft", "sampling")}
        return Phases(**means, host=self._wall_ms / self._num_steps - sum(means.values()))

    def _seams(self) -> Iterator[tuple[Any, str, str]]:
        """Object, method, and the phase that a call of it belongs to."""
        engine = self._engine
        target, draft = engine._target, engine._draft
        if target._graphs is not None:
            yield target._graphs._graphs, "launch", "target"
        else:
            yield target, "forward", "target"
        yield engine, "_verify", "sampling"
        if draft is not None and draft.graphs is not None:
            for cache in (draft.graphs._absorbs, draft.graphs._drafts, draft.graphs._drawn):
                yield cache, "launch", "draft"
        elif draft is not None:
            yield engine, "_absorb", "draft"
            yield engine, "_propose", "draft"

    def _stamped(self, call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def stamped(*args: Any, **kwargs: Any) -> Any:
            began = self._stamp()
            result = call(*args, **kwargs)
            self._spans[phase].append((began, self._stamp()))
            return result

        return stamped

    def _stamp(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_ms(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) if self._is_cuda else 1e3 * (ended - began)
