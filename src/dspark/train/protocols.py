"""What training needs from a model: the target to train or to freeze, and the drafter beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class TargetFeatures:
    """Rows of a frozen target over a batch of windows.

    Attributes:
        hidden: [B, S, D] what the head reads; row s predicts token s + 1.
        target_hidden: [B, S, n * D] inputs of the chosen target layers, concatenated.
    """

    hidden: torch.Tensor
    target_hidden: torch.Tensor


@dataclass(frozen=True)
class DraftBlockRows:
    """One parallel draft pass over A blocks of every window.

    Attributes:
        head_hidden: [B, A, G, D] what the shared head reads (after the stage's norm).
        confidence_hidden: [B, A, G, D] what the confidence head reads (before the norm).
    """

    head_hidden: torch.Tensor
    confidence_hidden: torch.Tensor


class Trainable(Protocol):
    """Anything with weights that a run updates, saves and restores."""

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...

    def train(self, mode: bool = True) -> Any:
        """Choose between training and measuring; a measured forward is the one of inference."""


class TrainableTarget(Trainable, Protocol):
    """A target model over whole windows, every row seeing its own window's past only."""

    def loss_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the head's input rows [B * S, D] for token_ids [B, S]; differentiable."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float logits [N, V] of head rows [N, D]."""

    def target_features(self, token_ids: torch.Tensor) -> TargetFeatures:
        """Return the rows that a drafter learns from; no gradient."""

    def auxiliary_loss(self) -> torch.Tensor:
        """Return what the last `loss_rows` adds to the loss: the indexers' divergence from the attention."""

    def set_progress(self, progress: float) -> None:
        """Tell the model how far the run is, in [0, 1], before each update."""

    def balance_experts(self, rate: float) -> None:
        """Move every router's selection bias by rate towards even loads since the last call."""


class DraftHeads(Protocol):
    """The row-wise heads of a drafter, called on chunks of rows."""

    def draft_logits(self, head_hidden: torch.Tensor, prev_ids: torch.Tensor) -> torch.Tensor:
        """Return float logits [N, V]: the shared head plus what the previous token adds."""

    def confidence_logits(self, confidence_hidden: torch.Tensor, prev_ids: torch.Tensor) -> torch.Tensor:
        """Return [N] logits of the confidence."""


class TrainableDrafter(Trainable, DraftHeads, Protocol):
    """A drafter that proposes block_size tokens after each anchor in one pass."""

    @property
    def block_size(self) -> int: ...

    def draft(self, token_ids: torch.Tensor, anchors: torch.Tensor, target_hidden: torch.Tensor) -> DraftBlockRows:
        """Run the blocks whose anchors sit at positions `anchors` [B, A].

        A block may read target_hidden [B, S, n * D] of positions below its anchor only.
        """

    def balance_experts(self, rate: float) -> None:
        """As `TrainableTarget.balance_experts`, for the stages' routers."""
