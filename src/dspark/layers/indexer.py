"""The indexer: chooses the compressed rows that a query attends."""

from torch import Tensor, nn

from dspark.layers.compressor import Compressor
from dspark.layers.linear import Linear, LinearGroup, RMSNorm
from dspark.layers.plans import AttentionPlan, IndexerPlan, QuantPlan, Storage
from dspark.layers.quantisers import cache_form
from dspark.layers.state_view import StateView
from dspark.ops.index import candidate_rows
from dspark.ops.opset import OpSet
from dspark.ops.rope import Turn


class Indexer(nn.Module):
    """Scores compressed rows with small heads and picks the best, or restricts them to candidate blocks."""

    def __init__(self, plan: IndexerPlan, attention: AttentionPlan, ratio: int, quant: QuantPlan, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ratio = ratio
        self.ops = ops
        self.form = cache_form(plan.cache_quant, attention.rope.dim, plan.hadamard)
        self.wq_b = Linear(attention.q_rank, plan.num_heads * plan.head_dim, quant.dense, ops)
        self.weights_proj = Linear(attention.hidden_size, plan.num_heads, Storage.BF16, ops)
        if plan.key_compressor is not None:
            self.compressor = Compressor(plan.key_compressor, attention.hidden_size, attention.norm_eps, self.form, ops)
        elif plan.owns_keys:
            self.wk = Linear(attention.head_dim, plan.head_dim, Storage.BF16, ops)
            self.k_norm = RMSNorm(plan.head_dim, attention.norm_eps, ops)
        self.key_store = f"layers.{plan.key_layer}.index"

    @property
    def maps(self) -> list[Linear]:
        """Its maps of the layer's input, in the order of their columns in a joint product."""
        own = self.compressor.maps if self.plan.key_compressor is not None else []
        return [*own, self.weights_proj]

    def write_keys(self, sums: Tensor, maps: LinearGroup, latent: Tensor, turn: Turn, view: StateView) -> None:
        """Append the index keys of the groups that this pass completes.

        Args:
            sums: [sections, T, N] of `maps`. latent: [C, K], the compressed rows before rope.
            turn: of the groups' positions.
        """
        if self.plan.key_compressor is not None:
            groups = view.groups(self.key_store, self.ratio, self.plan.key_compressor.reach)
            self.compressor(sums, latent.dtype, maps, groups, turn)
        elif self.plan.owns_keys:
            groups = view.groups(self.key_store, self.ratio, self.ratio)
            self.ops.keep_rows(self.wk(latent), self.k_norm, turn, self.form, groups)

    def forward(
        self, sums: Tensor, maps: LinearGroup, q_latent: Tensor, turn: Turn, view: StateView, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Pick rows for each query.

        Args:
            sums: [sections, T, N] of `maps`. q_latent: [T, q_rank], quantised. turn: of the query positions.
            candidates: [T, C] bool from the candidate layer, or None before it.
        Returns:
            places of the picks in the compressed store [T, J], ascending by row, -1 where there are fewer; and the
            candidates for later layers.
        """
        longest = view.max_visible(self.ratio)
        if self._sees_all(longest):
            return view.visible_places(self.ratio), None
        visible = view.visible(self.ratio)
        scores = self._scores(sums, maps, q_latent, turn, view)
        plan, chosen_from = self.plan.candidates, None
        if plan is not None and plan.publishes:
            candidates = candidate_rows(scores, visible, plan.block_size, plan.num_blocks)
        elif plan is not None:
            chosen_from = candidates
        return view.addresses(self.ratio, self.ops.pick_rows(scores, visible, chosen_from, self.plan.topk)), candidates

    def _sees_all(self, longest: int) -> bool:
        """Whether every query keeps every row it may see, so that no score is needed."""
        plan = self.plan.candidates
        return longest <= self.plan.topk and (plan is None or longest <= plan.block_size * plan.num_blocks)

    def _scores(self, sums: Tensor, maps: LinearGroup, q_latent: Tensor, turn: Turn, view: StateView) -> Tensor:
        heads, width = self.plan.num_heads, self.plan.head_dim
        q = self.ops.form_rows(self.wq_b(q_latent).view(-1, heads, width), turn, self.form)
        keys = view.index_keys(self.key_store, self.ratio)
        return self.ops.index_scores(q, sums, maps.column(self.weights_proj), keys)
