"""The DSpark draft as something to train, and the two baselines that it is compared with."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dspark.layers.plans import ModelPlan
from dspark.models.dspark_draft import DsparkDraft
from dspark.train.protocols import DraftBlockRows
from dspark.train.sequence_view import BlockView
from dspark.train.target import LoadBalance, TrainingTarget, initialise, trainable
from dspark.train.twins import Recorder, training_ops

Variant = Literal["dspark", "parallel", "mtp"]
VARIANTS: tuple[Variant, ...] = ("dspark", "parallel", "mtp")


class TrainingDrafter(nn.Module):
    """See `TrainableDrafter`.

    `dspark` is the paper's draft. `parallel` is the same without the Markov head: its weights are zero and stay so,
    which keeps the layout of the checkpoint. `mtp` is one stage that proposes one token.
    """

    def __init__(self, target: TrainingTarget, variant: Variant, compiled: bool) -> None:
        super().__init__()
        self.variant = variant
        self.plan = variant_plan(target.plan, variant)
        self.recorder = Recorder()
        self.ops = training_ops(self.recorder, compiled)
        self.model = DsparkDraft(self.plan, self.ops)
        self._target = [target]  # in a list: its weights belong to another module
        self._loads = LoadBalance(self.model)

    @property
    def block_size(self) -> int:
        """Draft positions of a block."""
        return self.model.plan.block_size

    def draft(self, token_ids: Tensor, anchors: Tensor, target_hidden: Tensor) -> DraftBlockRows:
        """See `TrainableDrafter.draft`."""
        self.recorder.clear()
        batch, length = token_ids.shape
        view = BlockView(anchors, self.block_size, length, self.plan.window)
        positions = torch.arange(length, device=token_ids.device).repeat(batch)
        view.context = dict(self.model.context_rows(target_hidden.flatten(0, 1), positions))
        block = self.model.block_tokens(token_ids.gather(1, anchors).flatten())
        out = self.model(block, view, self._target[0].model)
        if torch.is_grad_enabled():
            self._loads.add(self.recorder.loads)
        shape = (*anchors.shape, self.block_size, -1)
        return DraftBlockRows(out.normed.view(shape), out.hidden.view(shape))

    def draft_logits(self, head_hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """See `DraftHeads.draft_logits`."""
        logits = self._target[0].logits(head_hidden)
        return logits + self.model.markov_bias(prev_ids) if self.variant == "dspark" else logits

    def confidence_logits(self, confidence_hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """See `DraftHeads.confidence_logits`."""
        return self.model.confidence_logits(confidence_hidden, prev_ids)

    def balance_experts(self, rate: float) -> None:
        """See `TrainableDrafter.balance_experts`."""
        self._loads.balance(rate)


def variant_plan(plan: ModelPlan, variant: Variant) -> ModelPlan:
    """The model plan with the draft of a variant."""
    assert plan.draft is not None
    if variant != "mtp":
        return plan
    return replace(plan, draft=replace(plan.draft, stages=plan.draft.stages[:1], block_size=1))


def new_drafter(target: TrainingTarget, variant: Variant, compiled: bool, seed: int = 0) -> TrainingDrafter:
    """A fresh drafter beside a target, on the target's device."""
    drafter = TrainingDrafter(target, variant, compiled)
    initialise(drafter.model, seed)
    trainable(drafter)
    if variant != "dspark":
        _silence_markov_head(drafter.model)
    return drafter.to(target.model.head.weight.device)


def _silence_markov_head(model: Any) -> None:
    """Zero the Markov head and take it out of training; the confidence then sees the hidden row alone."""
    for weight in (model.markov_embed.weight, model.markov_head.weight):
        weight.data.zero_()
        weight.requires_grad_(False)
