"""Latent attention: one shared key head over the window and the selected compressed rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from dspark.layers.compressor import Compressor
from dspark.layers.indexer import Indexer
from dspark.layers.linear import GroupedLinear, Linear, LinearGroup, RMSNorm, parameter
from dspark.layers.plans import CompressionPlan, LayerPlan, QuantPlan, RopePlan
from dspark.layers.quantisers import activation_form, cache_form
from dspark.layers.state_view import StateView
from dspark.ops.experts import Output
from dspark.ops.opset import OpSet
from dspark.ops.places import RingRows
from dspark.ops.rope import Turn, rope_frequencies


@dataclass
class PassContext:
    """What one pass hands from layer to layer.

    Attributes:
        rows: places of the rows picked, by layer index. candidates: mask of the candidate layer.
        turns: rotations of the pass's positions (ratio 0) and of the groups of a ratio, by their plan and ratio.
        homes: rings that take the pass's window rows at once, by layer name.
    """

    rows: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    turns: dict[tuple[RopePlan, int], Turn] = field(default_factory=dict)
    homes: Mapping[str, RingRows] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """What the rows of a pass give by themselves, before anybody looks at the state.

    Attributes:
        q_latent: [T, q_rank], quantised. q: [T, H * K].
        rows: [T, K], for the window, or the ring that has them already.
        sums: [sections, T, N] of the compressor's and the indexer's maps, None where there are none.
    """

    q_latent: Tensor
    rows: Tensor
    q: Tensor
    sums: Tensor | None


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
        self.wo_a = GroupedLinear(width, plan.o_groups * plan.o_rank, plan.o_groups, quant.block, quant.dense, ops)
        self.wo_b = Linear(plan.o_groups * plan.o_rank, plan.hidden_size, quant.dense, ops)
        self.latent_form = activation_form(quant)
        self.window_form = cache_form(plan.window_quant, plan.rope.dim)
        self.latent_maps = LinearGroup([self.wq_a, self.wkv], ops)
        self.register_buffer("freqs", rope_frequencies(plan.rope.dim, plan.rope.base, plan.rope.yarn), persistent=False)
        self.scale = plan.head_dim**-0.5
        if plan.compression is not None:
            self._add_compression(plan.compression, quant)

    def _add_compression(self, compression: CompressionPlan, quant: QuantPlan) -> None:
        plan, maps = self.plan, []
        self.compressed_store = f"layers.{compression.source_layer}.compressed"
        if compression.compressor is not None:
            form = cache_form(compression.cache_quant, plan.rope.dim)
            self.compressor = Compressor(compression.compressor, plan.hidden_size, plan.norm_eps, form, self.ops)
            maps += self.compressor.maps
        if compression.indexer is not None:
            self.indexer = Indexer(compression.indexer, plan, compression.ratio, quant, self.ops)
            maps += self.indexer.maps
        self.compression_maps = LinearGroup(maps, self.ops)

    def join_maps(self) -> None:
        """Let maps that read the same rows share one weight, where their storage allows it."""
        self.latent_maps.join()
        if self.plan.compression is not None:
            self.compression_maps.join()

    def window_rows(self, x: Tensor, turn: Turn, home: RingRows | None) -> Tensor:
        """Window keys [T, K] of quantised inputs x [T, D] at the positions of `turn`, or the ring that has them."""
        sums = self.ops.joint_sums(x, [self.ops.stored(self.wkv.weight, self.wkv.storage)])
        return self.ops.key_rows(sums, 0, x.dtype, self.kv_norm, turn, self.window_form, home)

    @property
    def turn_keys(self) -> list[tuple[RopePlan, int]]:
        """Which of `PassContext.turns` a pass reads here."""
        keys, compression = [(self.plan.rope, 0)], self.plan.compression
        if compression is not None and compression.compressor is not None:
            keys.append((self.plan.rope, compression.ratio))
        return keys

    def _turn(self, positions: Tensor, ratio: int, context: PassContext) -> Turn:
        """Rotations of a pass's positions, or of its groups'; computed by the first layer that asks."""
        key = self.plan.rope, ratio
        if key not in context.turns:
            context.turns[key] = self.ops.rotations(positions, self.freqs)
        return context.turns[key]

    def prepare(self, x: Tensor, quantised: Tensor, positions: Tensor, context: PassContext) -> Prepared:
        """What each row gives by itself, from x [T, D] and the same quantised at positions [T].

        Window keys go to their ring at once where `context` knows it.
        """
        turn = self._turn(positions, 0, context)
        query, key = (self.q_norm, self.latent_form), (self.kv_norm, self.window_form)
        maps = self.compression_maps if self.plan.compression is not None else None
        with self.ops.beside(x.device, "maps") as branch:
            sums = maps.sums(x) if maps is not None and maps.maps else None
        sums_of_latents = self.latent_maps.sums(quantised)
        q_latent, rows = self.ops.latents(sums_of_latents, x.dtype, query, key, turn, context.homes.get(self.key))
        q = self.wq_b(q_latent)
        branch.join()
        return Prepared(q_latent, rows, q, sums)

    def look(self, prepared: Prepared, view: StateView, context: PassContext) -> Tensor:
        """Write the pass's rows, choose what each query sees, and attend to it: [T, H, K]."""
        turn = self._turn(view.positions, 0, context)
        sources = view.window_keys(self.key, prepared.rows)
        if self.plan.compression is not None:
            sources.append(self._compressed_keys(prepared, turn, view, context))
        q = prepared.q.view(-1, self.plan.num_heads, self.plan.head_dim)
        eps = self.plan.norm_eps if self.plan.normalise_query_heads else None
        return self.ops.attend(q, turn, sources, self.attn_sink, self.scale, eps)

    def project_out(self, heads: Tensor) -> Output:
        """Each group of heads through its own rows of wo_a, then all groups through wo_b: [T, H, K] -> [T, D]."""
        return self.wo_b.terms(self.wo_a(heads.flatten(1)))

    def _compressed_keys(
        self, prepared: Prepared, turn: Turn, view: StateView, context: PassContext
    ) -> tuple[Tensor, Tensor]:
        """Write this pass's compressed rows where this layer owns them; return all rows and each query's picks."""
        compression, maps, sums = self.plan.compression, self.compression_maps, prepared.sums
        assert compression is not None
        if compression.compressor is not None:
            assert sums is not None
            groups = view.groups(self.compressed_store, compression.ratio, compression.compressor.reach)
            group_turn = self._turn(groups.positions, compression.ratio, context)
            latent = self.compressor(sums, prepared.q_latent.dtype, maps, groups, group_turn)
            if compression.indexer is not None:
                self.indexer.write_keys(sums, maps, latent, group_turn, view)
        if compression.indexer is not None:
            assert sums is not None
            chosen = self.indexer(sums, maps, prepared.q_latent, turn, view, context.candidates)
            context.rows[self.index], context.candidates = chosen
        if compression.pick_layer is None:
            return view.appended(self.compressed_store), view.visible_places(compression.ratio)
        return view.appended(self.compressed_store), context.rows[compression.pick_layer]
