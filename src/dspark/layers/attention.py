"""Latent attention: one shared key head over the window and the selected compressed rows."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dspark.layers.compressor import Compressor
from dspark.layers.indexer import Indexer
from dspark.layers.linear import GroupedLinear, Linear, RMSNorm, parameter
from dspark.layers.plans import CompressionPlan, LayerPlan, QuantPlan, RopePlan
from dspark.layers.quantisers import activation_quantiser, cache_quantiser
from dspark.layers.state_view import StateView
from dspark.ops.attention import KEY_CHUNK
from dspark.ops.opset import OpSet
from dspark.ops.rope import rope_frequencies, rotations


@dataclass
class SharedPicks:
    """What one pass hands from layer to layer.

    Attributes:
        rows: rows picked, by layer index. candidates: mask of the candidate layer.
        turns: rotations of the pass's positions, by their plan. every: all visible rows, by ratio.
    """

    rows: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    turns: dict[RopePlan, tuple[Tensor, Tensor]] = field(default_factory=dict)
    every: dict[int, Tensor] = field(default_factory=dict)


class Attention(nn.Module):
    """The attention of one block, or of one draft stage."""

    freqs: Tensor

    def __init__(self, layer: LayerPlan, quant: QuantPlan, ops: OpSet) -> None:
        super().__init__()
        plan = layer.attention
        self.plan = plan
        self.index = layer.index
        self.ops = ops
        self.key = layer.name
        self.wq_a = Linear(plan.hidden_size, plan.q_rank, quant.dense, ops)
        self.q_norm = RMSNorm(plan.q_rank, plan.norm_eps, ops)
        self.wq_b = Linear(plan.q_rank, plan.num_heads * plan.head_dim, quant.dense, ops)
        self.wkv = Linear(plan.hidden_size, plan.head_dim, quant.dense, ops)
        self.kv_norm = RMSNorm(plan.head_dim, plan.norm_eps, ops)
        self.attn_sink = parameter(plan.num_heads)
        width = plan.num_heads * plan.head_dim
        self.wo_a = GroupedLinear(width, plan.o_groups * plan.o_rank, plan.o_groups, quant.dense, ops)
        self.wo_b = Linear(plan.o_groups * plan.o_rank, plan.hidden_size, quant.dense, ops)
        self.quantise_input = activation_quantiser(quant, ops)
        self.quantise_window = cache_quantiser(plan.window_quant, plan.rope.dim, ops)
        self.register_buffer("freqs", rope_frequencies(plan.rope.dim, plan.rope.base, plan.rope.yarn), persistent=False)
        self.scale = plan.head_dim**-0.5
        if plan.compression is not None:
            self._add_compression(plan.compression, quant)

    def _add_compression(self, compression: CompressionPlan, quant: QuantPlan) -> None:
        self.quantise_compressed = cache_quantiser(compression.cache_quant, self.plan.rope.dim, self.ops)
        self.compressed_store = f"layers.{compression.source_layer}.compressed"
        if compression.compressor is not None:
            self.compressor = Compressor(compression.compressor, self.plan.hidden_size, self.plan.norm_eps, self.ops)
        if compression.indexer is not None:
            self.indexer = Indexer(compression.indexer, self.plan, compression.ratio, quant, self.ops)

    def window_rows(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Window keys [T, K] of quantised inputs x [T, D] at the positions of `turn`."""
        return self.quantise_window(self.ops.apply_rope(self.kv_norm(self.wkv(x)), *turn))

    def forward(self, x: Tensor, quantised: Tensor, view: StateView, picks: SharedPicks) -> Tensor:
        """x: [T, D] and the same quantised -> [T, D]; writes this layer's rows of the pass into the state."""
        if self.plan.rope not in picks.turns:
            picks.turns[self.plan.rope] = rotations(view.positions, self.freqs)
        turn = picks.turns[self.plan.rope]
        q_latent = self.quantise_input(self.q_norm(self.wq_a(quantised)))
        sources = [view.window_keys(self.key, self.window_rows(quantised, turn))]
        if self.plan.compression is not None:
            sources.append(self._compressed_keys(x, q_latent, turn, view, picks))
        return self.attend(q_latent, turn, sources)

    def attend(self, q_latent: Tensor, turn: tuple[Tensor, Tensor], sources: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Queries from their latent over `sources`, rotated back at the query positions and projected: [T, D]."""
        cos, sin = turn
        q = self.wq_b(q_latent).view(-1, self.plan.num_heads, self.plan.head_dim)
        if self.plan.normalise_query_heads:
            q = self.ops.rms_norm(q, None, self.plan.norm_eps)
        out = self.ops.sparse_attention(self.ops.apply_rope(q, cos, sin), sources, self.attn_sink, self.scale)
        return self._project_out(self.ops.apply_rope(out, cos, -sin))

    def _project_out(self, heads: Tensor) -> Tensor:
        """Each group of heads through its own rows of wo_a, then all groups through wo_b: [T, H, K] -> [T, D]."""
        return self.wo_b(self.quantise_input(self.wo_a(heads.flatten(1))))

    def _compressed_keys(
        self, x: Tensor, q_latent: Tensor, turn: tuple[Tensor, Tensor], view: StateView, picks: SharedPicks
    ) -> tuple[Tensor, Tensor]:
        """Write this pass's compressed rows where this layer owns them; return all rows and each query's picks."""
        compression = self.plan.compression
        assert compression is not None
        if compression.compressor is not None:
            latent = self.compressor(x, view, self.compressed_store)
            cos, sin = rotations(view.group_positions(compression.ratio), self.freqs)
            rows = self.quantise_compressed(self.ops.apply_rope(latent, cos, sin))
            view.append(self.compressed_store, compression.ratio, rows)
            if compression.indexer is not None:
                self.indexer.write_keys(x, latent, self.freqs, view)
        if compression.indexer is not None:
            chosen, picks.candidates = self.indexer(x, q_latent, turn, view, picks.candidates)
            picks.rows[self.index] = view.addresses(compression.ratio, chosen)
        if compression.pick_layer is None:
            if compression.ratio not in picks.every:
                every = self._every_visible_row(compression.ratio, view)
                picks.every[compression.ratio] = view.addresses(compression.ratio, every)
            index = picks.every[compression.ratio]
        else:
            index = picks.rows[compression.pick_layer]
        return view.appended(self.compressed_store), index

    def _every_visible_row(self, ratio: int, view: StateView) -> Tensor:
        """[T, J] row numbers, -1 beyond what a query sees; J in whole key chunks."""
        length = -(-max(view.max_visible(ratio), 1) // KEY_CHUNK) * KEY_CHUNK
        every = torch.arange(length, device=view.positions.device).expand(view.positions.shape[0], -1)
        return torch.where(every < view.visible(ratio).unsqueeze(-1), every, -1)
