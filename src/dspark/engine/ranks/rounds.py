"""Rounds on the devices of several ranks: every rank launches the same ones over columns of its own.

What rank 0's host writes between two launches reaches the followers with the next launch, so a round costs one call.
From the columns on, all ranks move on by rank 0's verdicts, drafts and lengths, which the launches themselves carry
over (`dspark.parallel.decisions`). Only rank 0 reads what came of a round.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from dspark.config.sampling import SamplingParams
from dspark.engine.device_round import DeviceRounds, RoundShape
from dspark.engine.graphs import GraphPlan
from dspark.engine.ranks.share import Share
from dspark.engine.speculation import Speculation
from dspark.engine.stopwatch import Phase, Stopwatch
from dspark.models.build import Model
from dspark.ops.draw import DrawKind
from dspark.speculative.device_lengths import Bounds, DeviceLengths
from dspark.state.model_state import ModelState


class Launcher(Protocol):
    """What rounds need of a rank's part."""

    model: Model
    state: ModelState
    rounds: DeviceRounds | None
    stopwatch: Stopwatch


class RankedRounds(DeviceRounds):
    """Rank 0's rounds, which all ranks launch."""

    share: Share[Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._written: list[tuple[str, Any]] = []

    def _write(self, columns: Sequence[Sequence[int]]) -> None:
        super()._write(columns)
        self._written.append(("_write", columns))

    def empty(self, number: int) -> None:
        """See `DeviceRounds.empty`."""
        super().empty(number)
        self._written.append(("empty", number))

    def set_pages(self, tables: Sequence[Sequence[int]]) -> None:
        """See `DeviceRounds.set_pages`."""
        if self.buffers.set_pages(tables):
            self._written.append(("set_pages", tables))

    def set_bounds(self, bounds: Bounds) -> None:
        """See `DeviceRounds.set_bounds`."""
        if self.buffers.set_bounds(bounds):
            self._written.append(("set_bounds", bounds))

    def set_sampling(self, params: Sequence[SamplingParams]) -> DrawKind:
        """See `DeviceRounds.set_sampling`."""
        self._written.append(("set_sampling", params))
        return super().set_sampling(params)

    def launch(self, shape: RoundShape) -> None:
        """See `DeviceRounds.launch`. While rank 0 measures its phases all ranks launch in parts, and capture alike."""
        in_parts = self._stopwatch.listener is not None
        written, self._written = self._written, []
        self.share.run(launch_round, written, shape, in_parts, kind=(shape, in_parts))


class _Nobody:
    """Listens to phases and keeps nothing."""

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """See `PhaseListener.phase`."""
        return nullcontext()


def make_rounds(
    part: Launcher, plan: GraphPlan, speculation: Speculation, lengths: DeviceLengths, num_valid_tokens: int
) -> None:
    """Rounds over the stores of a follower."""
    part.rounds = DeviceRounds(part.model, part.state, plan, speculation, lengths, num_valid_tokens, part.stopwatch)


def launch_round(part: Launcher, written: Sequence[tuple[str, Any]], shape: RoundShape, in_parts: bool) -> None:
    """Launch a round; a follower writes first what rank 0's host has written already."""
    rounds = part.rounds
    assert rounds is not None
    if not isinstance(rounds, RankedRounds):
        part.stopwatch.listener = _Nobody() if in_parts else None
        with torch.inference_mode():
            for name, value in written:
                getattr(rounds, name)(value)
    DeviceRounds.launch(rounds, shape)
