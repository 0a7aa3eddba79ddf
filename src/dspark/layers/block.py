"""One transformer block: optional Engram, then attention and feed-forward halves inside hyper-connections."""

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

from dspark.layers.attention import Attention, SharedPicks
from dspark.layers.engram import Engram
from dspark.layers.hyper import HalfMix
from dspark.layers.linear import RMSNorm
from dspark.layers.moe import MixtureOfExperts
from dspark.layers.plans import LayerPlan, QuantPlan
from dspark.layers.state_view import StateView
from dspark.ops.opset import OpSet


class Block(nn.Module):
    """A block works on the residual streams [T, S, D] and on the pre-weights [T, S] carried between halves."""

    def __init__(self, plan: LayerPlan, quant: QuantPlan, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.hc_attn = HalfMix(plan.hyper, plan.hidden_size, ops)
        self.attn_norm = RMSNorm(plan.hidden_size, plan.norm_eps, ops)
        self.attn = Attention(plan, quant, ops)
        self.hc_ffn = HalfMix(plan.hyper, plan.hidden_size, ops)
        self.ffn_norm = RMSNorm(plan.hidden_size, plan.norm_eps, ops)
        self.ffn = MixtureOfExperts(plan.moe, quant, ops)
        self.engram = Engram(plan.engram, plan.hyper, plan.hidden_size, quant, ops) if plan.engram else None

    def attention_half(
        self, streams: Tensor, carried: Tensor, view: StateView, picks: SharedPicks
    ) -> tuple[Tensor, Tensor]:
        """Streams after the attention half, and its pre-weights."""
        x, mix = self.hc_attn(streams, carried, self.attn_norm)
        return self.ops.expand_streams(self.attn(x, view, picks), streams, mix), mix.pre

    def feed_forward_half(self, streams: Tensor, carried: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Streams after the feed-forward half, and its pre-weights."""
        x, mix = self.hc_ffn(streams, carried, self.ffn_norm)
        return self.ops.expand_streams(self.ffn(x, token_ids), streams, mix), mix.pre


class BlockList(nn.ModuleList):
    """Blocks in order; a plain list of modules would forget what they are."""

    def __iter__(self) -> Iterator[Block]:
        return cast(Iterator[Block], super().__iter__())
