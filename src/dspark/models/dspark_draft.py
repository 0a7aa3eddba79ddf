"""The DSpark draft: stages that see the target's features, a Markov and a confidence head (DSpark sec. 3.1, 3.2.1)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.layers.attention import PassContext
from dspark.layers.block import Block, BlockList
from dspark.layers.hyper import CarriedCollapse, HeadMix
from dspark.layers.linear import Embedding, Linear, RMSNorm
from dspark.layers.plans import ModelPlan, RopePlan, Storage
from dspark.layers.quantisers import activation_quantiser
from dspark.layers.state_view import StateView
from dspark.models.decoder import Decoder
from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.markov import MarkovHead
from dspark.ops.opset import OpSet
from dspark.ops.places import RingRows
from dspark.ops.rope import Turn
from dspark.parallel.group import ALONE, RankGroup


@dataclass(frozen=True)
class DraftHidden:
    """normed: [N, D] what the shared head reads. hidden: [N, D] before the final norm, for the confidence."""

    normed: Tensor
    hidden: Tensor


class DsparkDraft(nn.Module):
    """Draft stages; embedding and head belong to the target and are passed in.

    Ranks divide the stages as they divide the target's layers. Each holds the Markov head whole, since a launch that
    draws a token walks over the whole vocabulary.
    """

    def __init__(self, plan: ModelPlan, ops: OpSet, ranks: RankGroup = ALONE) -> None:
        super().__init__()
        assert plan.draft is not None
        self.plan = plan.draft
        self.ops = ops
        size, quant = plan.hidden_size, plan.quant
        self.main_proj = Linear(len(self.plan.target_layer_ids) * size, size, quant.dense, ops)
        self.main_norm = RMSNorm(size, plan.norm_eps, ops)
        self.stages = BlockList(Block(stage, quant, ops, ranks) for stage in self.plan.stages)
        self.collapse = HeadMix(plan.hyper, size, ops) if plan.head_mix else CarriedCollapse(ops)
        self.norm = RMSNorm(size, plan.norm_eps, ops)
        self.markov_embed = Embedding(plan.vocab_size, self.plan.markov_rank)
        self.markov_head = Linear(self.plan.markov_rank, plan.vocab_size, Storage.BF16, ops)
        self.confidence = Linear(size + self.plan.markov_rank, 1, Storage.BF16, ops)
        self.quantise = activation_quantiser(quant, ops)

    def context_rows(
        self, target_hidden: Tensor, positions: Tensor, homes: Mapping[str, RingRows] | None = None
    ) -> list[tuple[str, Tensor]]:
        """Window rows that each stage keeps of committed tokens.

        Args:
            target_hidden: [N, n * D] of committed rows. positions: [N] int64.
            homes: rings that take the rows at once, by store key.
        Returns:
            (store key, rows [N, K], or the ring that has them already) for each stage.
        """
        main = self.quantise(self.main_norm(self.main_proj(self.quantise(target_hidden))))
        turns: dict[RopePlan, Turn] = {}
        for stage in self.stages:
            if stage.attn.plan.rope not in turns:
                turns[stage.attn.plan.rope] = self.ops.rotations(positions, stage.attn.freqs)
        homes = homes or {}
        return [
            (stage.attn.key, stage.attn.window_rows(main, turns[stage.attn.plan.rope], homes.get(stage.attn.key)))
            for stage in self.stages
        ]

    def forward(self, token_ids: Tensor, view: StateView, target: Decoder) -> DraftHidden:
        """One parallel pass over draft blocks; base logits are `target.logits` of the normed rows.

        Args:
            token_ids: [N] int64, blocks of [anchor, noise, ...]. view: the blocks' positions and context windows.
            target: gives the embedding.
        """
        residual = target.embed_rows(token_ids)
        context = PassContext()
        for stage in self.stages:
            residual = stage.attention_half(residual, view, context)
            residual = stage.feed_forward_half(residual, token_ids)
        hidden, normed = self.collapse(residual, self.norm)
        return DraftHidden(normed, hidden)

    def block_tokens(self, anchors: Tensor, block_size: int | None = None) -> Tensor:
        """[R] anchors -> [R * G] block inputs: the anchor, then noise tokens; G is the trained size by default."""
        block = anchors.new_full((anchors.shape[0], block_size or self.plan.block_size), self.plan.noise_token_id)
        block[:, 0] = anchors
        return block.flatten()

    def markov_bias(self, previous_ids: Tensor) -> Tensor:
        """Bias [R, V] float32 on the next position's logits given the token before it [R] (DSpark eq. 5)."""
        return self.markov_head(self.markov_embed(previous_ids))

    def confidence_logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """Confidence logits [R] of hidden rows [R, D] after the tokens [R] (DSpark eq. 7)."""
        weight = self.ops.stored(self.confidence.weight, self.confidence.storage)
        return self.ops.confidence_logits(hidden, previous_ids, self.markov_embed.weight, weight)

    def draw_blocks(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchors: Tensor,
        positions: Tensor,
        params: DrawParams,
        kind: DrawKind,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and confidence logits, both [R, G], of blocks drawn left to right without a wait.

        Args:
            base_logits: [R, G, V] without columns of padding. hidden: [R, G, D].
            anchors, positions: [R] int64, the token before each block's first draft, and that draft's position.
            params, kind: see `dspark.ops.draw.draw_rows`.
        """
        weight = self.ops.stored(self.markov_head.weight, self.markov_head.storage)
        head = MarkovHead(self.markov_embed.weight, weight)
        tokens = self.ops.draw_blocks(base_logits, anchors, positions, head, params, kind)
        previous = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
        confidence = self.confidence_logits(hidden.flatten(0, 1), previous.flatten())
        return tokens, confidence.view(tokens.shape)
