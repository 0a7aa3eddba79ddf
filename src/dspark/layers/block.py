"""One transformer block: optional Engram, then attention and feed-forward halves inside hyper-connections."""

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

from dspark.layers.attention import Attention, PassContext, Prepared
from dspark.layers.engram import Engram
from dspark.layers.hyper import HalfMix
from dspark.layers.linear import RMSNorm
from dspark.layers.moe import MixtureOfExperts
from dspark.layers.plans import LayerPlan, QuantPlan
from dspark.layers.state_view import StateView
from dspark.ops.experts import Output
from dspark.ops.hyper import HalfInput, Residual
from dspark.ops.opset import OpSet
from dspark.parallel.group import ALONE, RankGroup


class Block(nn.Module):
    """A block reads and leaves a residual; each half's output is written into the streams by whoever reads next.

    Ranks that share the block each compute a part of a half's output; the parts are added up before it is left.
    """

    def __init__(self, plan: LayerPlan, quant: QuantPlan, ops: OpSet, ranks: RankGroup = ALONE) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.ranks = ranks
        self.hc_attn = HalfMix(plan.hyper, plan.hidden_size, quant.block, ops)
        self.attn_norm = RMSNorm(plan.hidden_size, plan.norm_eps, ops)
        self.attn = Attention(plan, quant, ops)
        self.hc_ffn = HalfMix(plan.hyper, plan.hidden_size, quant.block, ops)
        self.ffn_norm = RMSNorm(plan.hidden_size, plan.norm_eps, ops)
        self.ffn = MixtureOfExperts(plan.moe, quant, ops)
        self.engram = Engram(plan.engram, plan.hyper, plan.hidden_size, quant, ops, ranks) if plan.engram else None

    def attention_half(self, residual: Residual, view: StateView, context: PassContext) -> Residual:
        """The residual after the attention half; its streams are this block's input."""
        half, prepared = self.enter_attention(residual, view.positions, context)
        return self.leave_attention(half, self.attn.look(prepared, view, context))

    def enter_attention(
        self, residual: Residual, positions: Tensor, context: PassContext
    ) -> tuple[HalfInput, Prepared]:
        """What the rows at positions [T] give by themselves in front of the state."""
        half = self.hc_attn(residual, self.attn_norm)
        return half, self.attn.prepare(half.x, half.quantised, positions, context)

    def leave_attention(self, half: HalfInput, heads: Tensor) -> Residual:
        """The residual after the attention half, from its heads [T, H, K]."""
        return half.leave(self._joined(self.attn.project_out(heads)))

    def feed_forward_half(self, residual: Residual, token_ids: Tensor) -> Residual:
        """The residual after the feed-forward half."""
        half = self.hc_ffn(residual, self.ffn_norm)
        output = self.ffn(half.x, half.quantised, token_ids)
        return half.leave(self._joined(output))

    def _joined(self, output: Output) -> Output:
        """A half's output from this rank's part."""
        return output if self.ranks.size == 1 else self.ranks.sum(self.ops.sum_terms(output))


class BlockList(nn.ModuleList):
    """Blocks in order; a plain list of modules would forget what they are."""

    def __iter__(self) -> Iterator[Block]:
        return cast(Iterator[Block], super().__iter__())
