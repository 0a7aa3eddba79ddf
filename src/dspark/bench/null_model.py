"""A model that computes nothing: its passes answer at once, so that what an engine costs beside them can be timed.

Every token has one successor. The target always finds it; the draft finds it for its first positions and then errs.
"""

import torch
from torch import Tensor, nn

from dspark.layers.plans import ModelPlan
from dspark.layers.state_view import StateView
from dspark.models.build import Model
from dspark.models.decoder import PassTokens, TargetOutput
from dspark.models.dspark_draft import DraftHidden

_STEP = 7


class NullTarget(nn.Module):
    """Stands in for a `Decoder`; a hidden row is the id of its token."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        self.plan = plan
        self.dtype = torch.float32
        size = plan.vocab_size
        # Row t holds a large logit at the successor of t; 64 rows are as good as all of them.
        self.rows = torch.zeros(64, size)
        self.rows[torch.arange(64), successor(torch.arange(64), size) % size] = 8.0
        draft = plan.draft
        self.features = torch.zeros(1, len(draft.target_layer_ids) * plan.hidden_size if draft else 1)

    def forward(self, tokens: PassTokens, view: StateView) -> TargetOutput:
        """Nothing is computed and no row written."""
        count = tokens.token_ids.shape[0]
        features = self.features.expand(count, -1) if self.plan.draft else None
        return TargetOutput(tokens.token_ids.unsqueeze(-1), features)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, 1] ids -> [T, V]."""
        return self.rows[hidden[:, 0] % 64]


class NullDraft(nn.Module):
    """Stands in for a `DsparkDraft`; its first `num_right` positions are right."""

    def __init__(self, plan: ModelPlan, num_right: int) -> None:
        super().__init__()
        assert plan.draft is not None
        self.plan = plan.draft
        self.vocab_size = plan.vocab_size
        self.num_right = num_right

    def context_rows(self, target_hidden: Tensor, positions: Tensor) -> list[tuple[str, Tensor]]:
        """Zeros for every stage."""
        count = positions.shape[0]
        return [(stage.name, torch.zeros(count, stage.attention.head_dim)) for stage in self.plan.stages]

    def block_tokens(self, anchors: Tensor, block_size: int) -> Tensor:
        """[R] anchors -> [R * G]: each position holds the token before the one that it predicts."""
        columns = [anchors]
        for k in range(1, block_size):
            columns.append(successor(columns[-1], self.vocab_size) + (k == self.num_right))
        return torch.stack(columns, dim=1).flatten()

    def forward(self, token_ids: Tensor, view: StateView, target: NullTarget) -> DraftHidden:
        """The ids themselves are the hidden rows."""
        hidden = token_ids.unsqueeze(-1)
        return DraftHidden(hidden, hidden)

    def markov_bias(self, previous_ids: Tensor) -> None:
        """There is no sequential head."""

    def confidence_logits(self, hidden: Tensor, previous_ids: Tensor) -> None:
        """There is no confidence head."""


def successor(token_ids: Tensor, vocab_size: int) -> Tensor:
    """The token that follows another, below 64 so that a table of 64 rows knows it."""
    return (token_ids % 64 * _STEP + 3) % 64 % vocab_size


def null_model(plan: ModelPlan, num_right: int = 3) -> Model:
    """A model of a plan whose networks answer at once."""
    with torch.device("meta"):
        model = Model(plan)
    model.target = NullTarget(plan)  # type: ignore[assignment]
    model.draft = NullDraft(plan, num_right) if plan.draft else None  # type: ignore[assignment]
    return model
