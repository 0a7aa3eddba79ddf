"""One engine's part on one rank: stores and runners."""

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from dspark.engine.device_round import DeviceRounds
from dspark.engine.graphs import GraphPlan
from dspark.engine.ranks.state import RankedState
from dspark.engine.runner import DraftRunner, TargetRunner
from dspark.engine.stopwatch import Stopwatch
from dspark.models.build import Model
from dspark.state.model_state import ModelState

Stores = TypeVar("Stores", bound=ModelState)


@dataclass(frozen=True)
class PartPlan:
    """One engine on all ranks.

    Attributes:
        num_slots, num_pages, max_query_len, dtype, index_dtype, max_rewind, max_ahead: see `ModelState`.
        graphs: see `plan_graphs`; None runs eagerly.
        draft_width: drafts of a round, 0 without the model's own draft.
        num_valid_tokens: real vocabulary size.
    """

    num_slots: int
    num_pages: int
    max_query_len: int
    dtype: torch.dtype
    index_dtype: torch.dtype
    max_rewind: int
    max_ahead: int
    graphs: GraphPlan | None
    draft_width: int
    num_valid_tokens: int

    def state(self, model: Model, kind: type[Stores], device: torch.device) -> Stores:
        """Empty stores beside a rank's part of a model, on its device."""
        return kind(
            model.plan,
            self.num_slots,
            self.num_pages,
            self.max_query_len,
            self.dtype,
            device,
            index_dtype=self.index_dtype,
            max_rewind=self.max_rewind,
            max_ahead=self.max_ahead,
        )


@dataclass
class RankPart:
    """One engine's part on one rank.

    Attributes:
        state: the stores; on a follower nothing in them is held by anybody.
        target, draft, rounds: what runs; rank 0's are set by its engine.
        images: saved states by number.
        target_hidden: features of the last target pass, span after span, with the number of rows of each.
    """

    model: Model
    state: ModelState
    target: TargetRunner | None = None
    draft: DraftRunner | None = None
    rounds: DeviceRounds | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    images: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    target_hidden: Tensor | None = None
    span_rows: list[int] = field(default_factory=list)


def make_part(model: Model, plan: PartPlan) -> RankPart:
    """Stores and, on a follower, runners; rank 0's engine makes its own."""
    device = model.target.embed.weight.device
    if model.target.ranks.rank == 0:
        return RankPart(model, plan.state(model, RankedState, device))
    state, draft = plan.state(model, ModelState, device), None
    if plan.draft_width:
        draft = DraftRunner(model, state, plan.draft_width, plan.graphs, plan.num_valid_tokens)
    return RankPart(model, state, TargetRunner(model, state, plan.graphs), draft)
