"""The target: embedding, blocks on residual streams, final norm, head; assembled from a plan, ignorant of serving."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.layers.attention import SharedPicks
from dspark.layers.block import Block, BlockList
from dspark.layers.hyper import CarriedCollapse, HeadMix, first_stream
from dspark.layers.linear import Embedding, Linear, RMSNorm
from dspark.layers.plans import ModelPlan, Storage
from dspark.layers.state_view import StateView
from dspark.ops.opset import OpSet


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


class Decoder(nn.Module):
    """The target model."""

    token_map: Tensor | None

    def __init__(self, plan: ModelPlan, ops: OpSet, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.dtype = dtype
        self.embed = Embedding(plan.vocab_size, plan.hidden_size)
        self.layers = BlockList(Block(layer, plan.quant, ops) for layer in plan.layers)
        self.collapse = HeadMix(plan.hyper, plan.hidden_size, ops) if plan.head_mix else CarriedCollapse(ops)
        self.norm = RMSNorm(plan.hidden_size, plan.norm_eps, ops)
        self.head = Linear(plan.hidden_size, plan.vocab_size, Storage.BF16, ops)
        draft = plan.draft
        self.captured_inputs = frozenset(draft.target_layer_ids if draft and not draft.captures_output else ())
        self.captured_outputs = frozenset(draft.target_layer_ids if draft and draft.captures_output else ())
        token_map = torch.arange(plan.vocab_size) if plan.ngrams else None
        self.register_buffer("token_map", token_map, persistent=False)

    def forward(self, tokens: PassTokens, view: StateView) -> TargetOutput:
        """One pass over T rows; every layer reads and writes the state through `view`."""
        num_streams = self.plan.hyper.num_streams
        streams = self.embed_streams(tokens.token_ids)
        carried = first_stream(streams.shape[0], num_streams, streams.device)
        ngrams = self._compressed_ngrams(tokens.ngrams)
        picks = SharedPicks()
        captured: list[Tensor] = []
        for index, block in enumerate(self.layers):
            if block.engram is not None:
                streams = block.engram(streams, ngrams)
            if index in self.captured_inputs:
                captured.append(self.ops.mean_streams(streams))
            streams, carried = block.attention_half(streams, carried, view, picks)
            streams, carried = block.feed_forward_half(streams, carried, tokens.token_ids)
            if index in self.captured_outputs:
                captured.append(self.ops.mean_streams(streams))
        hidden = self.norm(self.collapse(streams, carried))
        return TargetOutput(hidden, torch.cat(captured, dim=-1) if captured else None)

    def embed_streams(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, S, D]: the embedding copied into every stream."""
        return self.embed(token_ids).to(self.dtype).unsqueeze(1).repeat(1, self.plan.hyper.num_streams, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, V] float32."""
        return self.ops.linear_wide(hidden, self.ops.stored(self.head.weight, self.head.storage))

    def _compressed_ngrams(self, ngrams: Tensor | None) -> Tensor | None:
        if self.plan.ngrams is None or ngrams is None:
            return None
        assert self.token_map is not None
        known = self.token_map[ngrams.clamp(min=0)]
        return torch.where(ngrams >= 0, known, self.token_map[self.plan.ngrams.pad_token_id])
