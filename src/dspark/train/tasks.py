"""What a run trains: a loss for a batch, held-out figures, and what happens between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dspark.train.losses import DraftLoss, DraftLossWeights, dspark_loss, target_loss
from dspark.train.protocols import TargetFeatures, Trainable, TrainableDrafter, TrainableTarget
from dspark.train.tokenizer import EOS, TOKEN_ID


@dataclass(frozen=True)
class Heldout:
    """Figures of one held-out batch as sums, so that batches add up: name -> (sum, count)."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)


class Task(Protocol):
    """One thing to train."""

    @property
    def module(self) -> Trainable:
        """What is updated, saved and restored."""

    def clip_group(self, name: str) -> str:
        """Name the parameters whose gradient norm is bounded together."""

    def before_step(self, progress: float) -> None:
        """Prepare an update at a progress in [0, 1]."""

    def loss(self, token_ids: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the scalar to minimise for windows [B, S + 1], and figures to log (detached)."""

    def heldout(self, token_ids: torch.Tensor) -> Heldout:
        """Measure held-out windows [B, S + 1]; no gradient."""

    def after_step(self, factor: float) -> None:
        """Run what follows an update; factor is the schedule's."""


class TargetTask:
    """Next-token training of the target.

    Args:
        target: the model.
        z_weight: see `target_loss`.
        index_weight: of the indexers' divergence.
        bias_rate: step of the routers' selection bias at full learning rate.
    """

    def __init__(
        self, target: TrainableTarget, z_weight: float = 1e-4, index_weight: float = 0.1, bias_rate: float = 1e-3
    ) -> None:
        self.module = target
        self._z_weight = z_weight
        self._index_weight = index_weight
        self._bias_rate = bias_rate

    def clip_group(self, name: str) -> str:
        return "target"

    def before_step(self, progress: float) -> None:
        self.module.set_progress(progress)

    def loss(self, token_ids: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        hidden = self.module.loss_rows(token_ids[:, :-1])
        index = self.module.auxiliary_loss()
        loss, entropy = target_loss(hidden, token_ids[:, 1:].reshape(-1), self.module.logits, self._z_weight)
        return loss + self._index_weight * index, {"ce": entropy, "index": index.detach()}

    @torch.no_grad()
    def heldout(self, token_ids: torch.Tensor) -> Heldout:
        labels = token_ids[:, 1:].reshape(-1)
        hidden = self.module.loss_rows(token_ids[:, :-1])
        _, entropy = target_loss(hidden, labels, self.module.logits)
        return Heldout({"loss": (float(entropy) * len(labels), len(labels))})

    def after_step(self, factor: float) -> None:
        self.module.balance_experts(self._bias_rate * factor)


class DraftTask:
    """DSpark training of drafters against one frozen target (sec. 3.3).

    Random anchors in every window form independent blocks. A block counts up to the end of its document: where
    a token before the predicted one is eos, the row is masked, because generation would have stopped. Several
    drafters learn side by side from the same target rows and anchors, which is what makes them comparable; they
    share no parameter, and their gradients are clipped apart.

    Args:
        drafters: what is trained, by name; modules of torch.
        target: frozen.
        anchors_per_window: blocks of a window.
        seed: of the anchors; the anchors of a step depend on (seed, step) only.
        weights: of the loss.
        bias_rate: as in `TargetTask`.
    """

    def __init__(
        self,
        drafters: Mapping[str, TrainableDrafter],
        target: TrainableTarget,
        anchors_per_window: int = 32,
        seed: int = 0,
        weights: DraftLossWeights | None = None,
        bias_rate: float = 1e-3,
    ) -> None:
        self.module = torch.nn.ModuleDict(dict(drafters))  # type: ignore[arg-type]
        self._drafters = dict(drafters)
        self._target = target
        self._num_anchors = anchors_per_window
        self._seed = seed
        self._weights = weights or DraftLossWeights()
        self._bias_rate = bias_rate
        self._longest = max(drafter.block_size for drafter in drafters.values())

    def clip_group(self, name: str) -> str:
        return name.split(".", 1)[0]

    def before_step(self, progress: float) -> None:
        pass

    def loss(self, token_ids: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        measured = self._measure(token_ids, step)
        figures: dict[str, torch.Tensor] = {}
        for name, each in measured.items():
            figures |= {f"{name}.ce": each.ce, f"{name}.l1": each.l1, f"{name}.bce": each.bce}
            figures[f"{name}.accepted_len"] = each.accepted_len[0]
        return torch.stack([each.loss for each in measured.values()]).sum(), figures

    @torch.no_grad()
    def heldout(self, token_ids: torch.Tensor) -> Heldout:
        windows = len(token_ids)
        sums: dict[str, tuple[float, float]] = {"loss": (0.0, 0.0)}
        for name, each in self._measure(token_ids, step=0).items():
            sums["loss"] = (sums["loss"][0] + float(each.loss) * windows, windows)
            for sampler, value in zip(("ratio", "greedy"), each.accepted_len.tolist(), strict=True):
                sums[f"{name}.accepted_len_{sampler}"] = (value * windows, windows)
            rows = each.rows.tolist()
            for figure in ("overlap", "agree", "confidence"):
                for k, value in enumerate(getattr(each, figure).tolist(), start=1):
                    sums[f"{name}.{figure}_{k}"] = (value * rows[k - 1], rows[k - 1])
        return Heldout(sums)

    def after_step(self, factor: float) -> None:
        for drafter in self._drafters.values():
            drafter.balance_experts(self._bias_rate * factor)

    def _measure(self, token_ids: torch.Tensor, step: int) -> dict[str, DraftLoss]:
        inputs = token_ids[:, :-1]
        features = self._target.target_features(inputs)
        anchors = draw_anchors(token_ids.shape, self._longest, self._num_anchors, (self._seed, step))
        anchors = anchors.to(token_ids.device)
        return {
            name: self._measure_one(drafter, token_ids, anchors, features) for name, drafter in self._drafters.items()
        }

    def _measure_one(
        self,
        drafter: TrainableDrafter,
        token_ids: torch.Tensor,
        anchors: torch.Tensor,
        features: TargetFeatures,
    ) -> DraftLoss:
        block = drafter.draft(token_ids[:, :-1], anchors, features.target_hidden)
        labels = block_labels(token_ids, anchors, drafter.block_size, features)
        return dspark_loss(
            drafter,
            self._target.logits,
            block.head_hidden.flatten(0, 1),
            block.confidence_hidden.flatten(0, 1),
            labels.target_rows,
            labels.prev_ids,
            labels.labels,
            labels.valid,
            self._weights,
        )


@dataclass(frozen=True)
class BlockLabels:
    """What a block's rows are compared with; N = B * A blocks.

    Attributes:
        target_rows: [N, G, D] the target's head rows at positions anchor .. anchor + G - 1.
        prev_ids, labels: [N, G] tokens at anchor .. and at anchor + 1 ...
        valid: [N, G] no eos among the tokens up to prev.
    """

    target_rows: torch.Tensor
    prev_ids: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor


def block_labels(
    token_ids: torch.Tensor, anchors: torch.Tensor, block_size: int, features: TargetFeatures
) -> BlockLabels:
    """Gather the rows of blocks: with anchor 7 and G = 5, prev at 7..11, labels at 8..12, target rows 7..11."""
    batch, num_anchors = anchors.shape
    at = anchors[:, :, None] + torch.arange(block_size, device=anchors.device)
    window = torch.arange(batch, device=anchors.device)[:, None, None]
    prev_ids = token_ids[window, at]
    valid = (prev_ids == TOKEN_ID[EOS]).cumsum(-1) == 0
    flat = batch * num_anchors
    return BlockLabels(
        target_rows=features.hidden[window, at].reshape(flat, block_size, -1),
        prev_ids=prev_ids.reshape(flat, block_size),
        labels=token_ids[window, at + 1].reshape(flat, block_size),
        valid=valid.reshape(flat, block_size),
    )


def draw_anchors(shape: Iterable[int], block_size: int, num_anchors: int, key: tuple[int, int]) -> torch.Tensor:
    """Draw anchor positions [B, A], ascending and distinct within a window, from (seed, step) alone.

    Every anchor leaves one context row below it and block_size tokens above it inside the window [B, S + 1]:
    1 <= anchor <= S - block_size.

    Raises:
        ValueError: a window is too short for that many anchors.
    """
    batch, window_len = shape
    places = window_len - 1 - block_size
    if places < num_anchors:
        raise ValueError(f"windows of {window_len} tokens have {places} anchor positions, not {num_anchors}")
    generator = torch.Generator().manual_seed((key[0] * 1_000_003 + key[1]) % 2**63)
    order = torch.rand(batch, places, generator=generator).argsort(-1)
    return order[:, :num_anchors].sort(-1).values + 1
