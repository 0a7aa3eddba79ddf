"""The indexer: chooses the compressed rows that a query attends."""

import torch
from torch import Tensor, nn

from dspark.layers.compressor import Compressor
from dspark.layers.linear import Linear, RMSNorm
from dspark.layers.plans import AttentionPlan, IndexerPlan, QuantPlan, Storage
from dspark.layers.quantisers import cache_quantiser
from dspark.layers.state_view import StateView
from dspark.ops.hadamard import hadamard_matrix
from dspark.ops.index import candidate_rows
from dspark.ops.opset import OpSet
from dspark.ops.rope import rotations


class Indexer(nn.Module):
    """Scores compressed rows with small heads and picks the best, or restricts them to candidate blocks."""

    rotation: Tensor | None

    def __init__(self, plan: IndexerPlan, attention: AttentionPlan, ratio: int, quant: QuantPlan, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ratio = ratio
        self.ops = ops
        self.wq_b = Linear(attention.q_rank, plan.num_heads * plan.head_dim, quant.dense, ops)
        self.weights_proj = Linear(attention.hidden_size, plan.num_heads, Storage.BF16, ops)
        if plan.key_compressor is not None:
            self.compressor = Compressor(plan.key_compressor, attention.hidden_size, attention.norm_eps, ops)
        elif plan.owns_keys:
            self.wk = Linear(attention.head_dim, plan.head_dim, Storage.BF16, ops)
            self.k_norm = RMSNorm(plan.head_dim, attention.norm_eps, ops)
        self.quantise = cache_quantiser(plan.cache_quant, attention.rope.dim, ops)
        self.register_buffer("rotation", hadamard_matrix(plan.head_dim) if plan.hadamard else None, persistent=False)
        self.key_store = f"layers.{plan.key_layer}.index"

    def write_keys(self, x: Tensor, latent: Tensor, freqs: Tensor, view: StateView) -> None:
        """Append the index keys of the groups that this pass completes; `latent` is the compressed row before rope."""
        if not self.plan.owns_keys:
            return
        if self.plan.key_compressor is not None:
            keys = self.compressor(x, view, self.key_store)
        else:
            keys = self.k_norm(self.wk(latent))
        cos, sin = rotations(view.group_positions(self.ratio), freqs)
        view.append(self.key_store, self.ratio, self._finish(self.ops.apply_rope(keys, cos, sin)))

    def forward(
        self, x: Tensor, q_latent: Tensor, turn: tuple[Tensor, Tensor], view: StateView, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Pick rows for each query.

        Args:
            x: [T, D]. q_latent: [T, q_rank], quantised. turn: cos and sin of the query positions.
            candidates: [T, C] bool from the candidate layer, or None before it.
        Returns:
            picks [T, topk] int64, ascending, -1 where there are fewer, and the candidates for later layers.
        """
        visible, longest = view.visible(self.ratio), view.max_visible(self.ratio)
        if self._sees_all(longest):
            every = torch.arange(self.plan.topk, device=x.device).expand(x.shape[0], -1)
            return torch.where(every < visible.unsqueeze(-1), every, -1), None
        scores = self._scores(x, q_latent, turn, view)
        allowed = torch.arange(scores.shape[1], device=x.device) < visible.unsqueeze(-1)
        plan = self.plan.candidates
        if plan is not None and plan.publishes:
            candidates = candidate_rows(scores, visible, plan.block_size, plan.num_blocks)
        elif plan is not None and candidates is not None:
            allowed = allowed & candidates[:, : scores.shape[1]]
        return self.ops.pick_rows(scores, allowed, self.plan.topk), candidates

    def _sees_all(self, longest: int) -> bool:
        """Whether every query keeps every row it may see, so that no score is needed."""
        plan = self.plan.candidates
        return longest <= self.plan.topk and (plan is None or longest <= plan.block_size * plan.num_blocks)

    def _scores(self, x: Tensor, q_latent: Tensor, turn: tuple[Tensor, Tensor], view: StateView) -> Tensor:
        heads, width = self.plan.num_heads, self.plan.head_dim
        q = self._finish(self.ops.apply_rope(self.wq_b(q_latent).view(-1, heads, width), *turn))
        weights = self.weights_proj(x).float() * (width**-0.5 * heads**-0.5)
        return self.ops.index_scores(q, weights, view.index_keys(self.key_store, self.ratio))

    def _finish(self, rows: Tensor) -> Tensor:
        """Rotate by the Hadamard matrix where the plan has one, then quantise: [.., K] -> [.., K]."""
        if self.rotation is not None:
            rows = self.ops.linear(rows.reshape(-1, rows.shape[-1]), self.rotation).view(rows.shape)
        return self.quantise(rows)
