"""Opening an engine on several ranks: the team, every rank's weights, and the memory that all of them have left."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.config import Config
from dspark.engine.device import place
from dspark.engine.device_memory import DeviceMemory, Room, memory_of
from dspark.engine.loading import LoadingNews
from dspark.engine.ranks.failure import TimeLimits
from dspark.engine.ranks.meeting import RankPlace
from dspark.engine.ranks.share import Share
from dspark.engine.ranks.team import Team, team_of
from dspark.models.build import Model, load_model
from dspark.models.model_bytes import held_bytes
from dspark.ops.table import TablePlace
from dspark.parallel.group import RankGroup

_LOG = logging.getLogger("dspark.engine")


@dataclass(frozen=True)
class CheckpointPlan:
    """What every rank reads its part of: the folders, and the configuration that says how."""

    folder: Path
    draft_folder: Path | None
    config: Config


def open_on_ranks(root: Share[RankPlace], plan: CheckpointPlan) -> Share[Model]:
    """A checkpoint on all ranks, each of which reads its part.

    Raises:
        RankError, CheckpointError, ConfigError: a rank could not.
    """
    began = time.perf_counter()
    share = root.derive(_load_part, plan)
    held = ", ".join(f"rank {rank} {size / 1e9:.2f} GB" for rank, size in enumerate(share.ask(held_bytes)))
    _LOG.info("weights are read after %.1f s: %s", time.perf_counter() - began, held)
    return share


def _load_part(own: RankPlace, plan: CheckpointPlan) -> Model:
    return read_checkpoint(plan, own.device, own.group, own.say)


def read_checkpoint(
    plan: CheckpointPlan, device: torch.device, ranks: RankGroup, say: Callable[[str], None] = _LOG.info
) -> Model:
    """A checkpoint, or the part of it that one of several ranks holds; `say` is told how far it is."""
    placement = place(plan.config)
    return load_model(
        plan.folder,
        placement.ops,
        placement.dtype,
        with_draft=plan.config.speculative_config is not None,
        draft_folder=plan.draft_folder,
        device=device,
        ranks=ranks,
        whole_experts=plan.config.enable_expert_parallel,
        engram_tables=TablePlace(plan.config.engram_tables),
        on_read=LoadingNews(say),
    )


def open_team(config: Config, device: torch.device) -> Share[RankPlace] | None:
    """The ranks of an admitted configuration; None where one rank runs alone.

    Raises:
        RankError: a rank did not come.
    """
    if config.tensor_parallel_size == 1:
        return None
    limits = TimeLimits(config.rank_timeout_s, config.rank_setup_timeout_s)
    return root_of(team_of(config.tensor_parallel_size, device.type, limits))


def root_of(team: Team) -> Share[RankPlace]:
    """The ranks' own places, from which everything else is made."""
    return Share(team, 0, team.place)


class TeamMemory:
    """Memory of all ranks' devices: what the one with the least has left."""

    def __init__(self, own: DeviceMemory, root: Share[RankPlace], config: Config) -> None:
        self.measures = own.measures
        self._own = own
        self._root = root
        self._config = config

    def room(self) -> Room:
        """See `DeviceMemory.room`."""
        rooms: list[Room] = self._root.ask(_room, self._config)
        least = min(rooms, key=lambda room: room.spendable)
        return least.for_each(len(rooms), self._root.own.device)

    def need_of(self, work: Callable[[], object]) -> int:
        """See `DeviceMemory.need_of`: rank 0's, which samples besides what all ranks do."""
        return self._own.need_of(work)


def _room(own: RankPlace, config: Config) -> Room:
    return memory_of(own.device, config).room()
