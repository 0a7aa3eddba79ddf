"""The target: embedding, blocks on residual streams, final norm, head; assembled from a plan, ignorant of serving."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.layers.attention import Attention, PassContext, Prepared
from dspark.layers.block import Block, BlockList
from dspark.layers.hyper import CarriedCollapse, HeadMix, embedded
from dspark.layers.linear import Embedding, Linear, RMSNorm
from dspark.layers.plans import ModelPlan, Storage
from dspark.layers.state_view import StateView
from dspark.ops.hyper import Residual, written_streams
from dspark.ops.opset import OpSet
from dspark.parallel.group import ALONE, RankGroup


@dataclass(frozen=True)
class PassTokens:
    """Token ids of a pass.

    token_ids: [T] int64. ngrams: [T, n] int64, column 0 the row's own token and then its predecessors, -1 before the
    start of the request; None where the model has no Engram.
    """

    token_ids: Tensor
    ngrams: Tensor | None = None


@dataclass(frozen=True)
class TargetOutput:
    """hidden: [T, D] after the final norm. target_hidden: [T, n * D] features for the draft, None without a draft."""

    hidden: Tensor
    target_hidden: Tensor | None


@dataclass(frozen=True)
class Seam:
    """Where the rows of a pass have given all that they give by themselves, and attention looks at the state."""

    attention: Attention
    prepared: Prepared

    def look(self, view: StateView, context: PassContext) -> Tensor:
        """Heads [T, H, K]."""
        return self.attention.look(self.prepared, view, context)


Stages = Generator[Seam, Tensor | None, TargetOutput]


class Decoder(nn.Module):
    """The target model, or one rank's part of it."""

    token_map: Tensor | None

    def __init__(
        self, plan: ModelPlan, ops: OpSet, dtype: torch.dtype = torch.float32, ranks: RankGroup = ALONE
    ) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.dtype = dtype
        self.ranks = ranks
        self.embed = Embedding(plan.vocab_size, plan.hidden_size)
        self.layers = BlockList(Block(layer, plan.quant, ops, ranks) for layer in plan.layers)
        self.collapse = HeadMix(plan.hyper, plan.hidden_size, ops) if plan.head_mix else CarriedCollapse(ops)
        self.norm = RMSNorm(plan.hidden_size, plan.norm_eps, ops)
        self.head = Linear(plan.hidden_size, plan.num_head_rows, Storage.BF16, ops)
        self.captured = _captured_inputs(plan)
        token_map = torch.arange(plan.vocab_size) if plan.ngrams else None
        self.register_buffer("token_map", token_map, persistent=False)

    def forward(self, tokens: PassTokens, view: StateView, context: PassContext | None = None) -> TargetOutput:
        """One pass over T rows; every layer reads and writes the state through `view`.

        Args:
            context: what is known of the pass before its first layer.
        """
        context = context or PassContext()
        return run_stages(self.stages(tokens, view.positions, context), lambda seam: seam.look(view, context))

    def stages(self, tokens: PassTokens, positions: Tensor, context: PassContext) -> Stages:
        """The same in pieces that know nothing of the state: each ends where a layer's attention looks at it.

        Whoever runs the stages sends the heads that `Seam.look` gives and gets the next seam, in the end the output.
        """
        residual = self.embed_rows(tokens.token_ids)
        ngrams = self._compressed_ngrams(tokens.ngrams)
        captured: list[Tensor] = []
        for index, block in enumerate(self.layers):
            if block.engram is not None:
                residual = block.engram(residual, ngrams)
            half, prepared = block.enter_attention(residual, positions, context)
            heads = yield Seam(block.attn, prepared)
            assert heads is not None
            residual = block.leave_attention(half, heads)
            if index in self.captured:
                captured.append(self.ops.mean_streams(residual.streams))
            residual = block.feed_forward_half(residual, tokens.token_ids)
        if len(self.layers) in self.captured:
            residual = Residual(written_streams(residual, self.ops.expand_streams), residual.carried)
            captured.append(self.ops.mean_streams(residual.streams))
        _, hidden = self.collapse(residual, self.norm)
        return TargetOutput(hidden, torch.cat(captured, dim=-1) if captured else None)

    def embed_rows(self, token_ids: Tensor) -> Residual:
        """What the first half reads of rows with these tokens [T]."""
        return embedded(self.embed.weight, token_ids, self.plan.hyper.num_streams, self.dtype, self.ops)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, V] float32."""
        own = self.ops.linear_wide(hidden, self.ops.stored(self.head.weight, self.head.storage))
        return self.ranks.gather_columns(own)

    def _compressed_ngrams(self, ngrams: Tensor | None) -> Tensor | None:
        if self.plan.ngrams is None or ngrams is None:
            return None
        assert self.token_map is not None
        known = self.token_map[ngrams.clamp(min=0)]
        return torch.where(ngrams >= 0, known, self.token_map[self.plan.ngrams.pad_token_id])


def run_stages(stages: Stages, look: Callable[[Seam], Tensor]) -> TargetOutput:
    """Run a pass to its end; `look` gives the heads at each seam."""
    heads = None
    while True:
        try:
            seam = stages.send(heads)
        except StopIteration as end:
            output: TargetOutput = end.value
            return output
        heads = look(seam)


def _captured_inputs(plan: ModelPlan) -> frozenset[int]:
    """Layers whose input streams are features of the draft; a layer's output is the input of the next one.

    That holds while no Engram layer follows a layer whose output is captured: Engram adds to the streams in between.
    """
    draft = plan.draft
    if draft is None:
        return frozenset()
    return frozenset(index + draft.captures_output for index in draft.target_layer_ids)
