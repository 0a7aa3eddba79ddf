"""What ranks exchange in a decode step: counted while a few steps run, then timed by themselves.

The time is that of the same sums and exchanges in a captured chain, one after the other with nothing between them.
Ranks that wait for each other inside a step add to the phases, not to this.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark.bench.device_timing import captured_us
from dspark.bench.dummy_weights import dummy_model
from dspark.config import Config
from dspark.engine.device import place
from dspark.engine.ranks.meeting import RankPlace
from dspark.engine.ranks.share import Share
from dspark.layers.plans import ModelPlan
from dspark.models.build import Model
from dspark.ops.table import TablePlace
from dspark.parallel.group import RankGroup

_OPERATIONS = ("sum", "gather_columns")


@dataclass(frozen=True)
class Exchange:
    """One call of a group. operation: a method of `RankGroup`."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one rank's tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Collectives:
    """Those of a step.

    Attributes:
        sums, gathers: how many.
        num_bytes: of one rank's tensors.
        ms: of all of them alone; None without an accelerator.
    """

    sums: float
    gathers: float
    num_bytes: float
    ms: float | None


class ExchangeCounter:
    """Notes the calls of a group."""

    def __init__(self, group: RankGroup) -> None:
        self._group: Any = group
        self.seen: list[Exchange] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count what runs inside."""
        for name in _OPERATIONS:
            setattr(self._group, name, partial(self._call, name, getattr(self._group, name)))
        try:
            yield
        finally:
            for name in _OPERATIONS:
                delattr(self._group, name)  # the method of the class is found again

    def _call(self, name: str, method: Any, x: Tensor) -> Tensor:
        self.seen.append(Exchange(name, tuple(x.shape), x.dtype))
        result: Tensor = method(x)
        return result


def measure_collectives(share: Share[Model], seen: Sequence[Exchange], num_steps: int) -> Collectives:
    """What the exchanges of so many steps come to in one."""
    sums = sum(one.operation == "sum" for one in seen)
    times: list[float | None] = share.ask(_chain_us, list(seen))
    total = max((us for us in times if us is not None), default=None)
    return Collectives(
        sums / num_steps,
        (len(seen) - sums) / num_steps,
        sum(one.num_bytes for one in seen) / num_steps,
        None if total is None else total / num_steps / 1e3,
    )


def _chain_us(model: Model, seen: Sequence[Exchange]) -> float | None:
    """Microseconds of a captured chain of exchanges; every rank runs it at the same time."""
    group, device = model.target.ranks, model.target.embed.weight.device
    if device.type != "cuda" or not seen:
        return None
    calls = [
        partial(getattr(group, one.operation), torch.zeros(one.shape, dtype=one.dtype, device=device)) for one in seen
    ]
    return captured_us(calls) * len(calls)


def dummy_part(own: RankPlace, plan: ModelPlan, config: Config) -> Model:
    """A rank's part of a model of random weights."""
    placement = place(config)
    with torch.no_grad():
        return dummy_model(
            plan,
            placement.ops,
            placement.dtype,
            own.device,
            own.group,
            config.enable_expert_parallel,
            engram_tables=TablePlace(config.engram_tables),
        )
