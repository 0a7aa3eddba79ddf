"""Twins of the model's ops for training: differentiable, dense, static in shape, with straight-through quantisation.

They compute the same function as the inference twins up to rounding; they do not keep the row law.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.layers.plans import Storage
from dspark.ops import attention, compress, engram, experts, hyper, index, kept_rows, norm, quantise, rope, route
from dspark.ops.index import IndexKeys
from dspark.ops.linear import grouped_linear_of
from dspark.ops.markov import confidence_logits_of
from dspark.ops.opset import TORCH_OPS, OpSet
from dspark.ops.route import Route

WEIGHT_BLOCK = 32
FP4_GROUP = 32


@dataclass
class Recorder:
    """What a forward leaves behind for the loss: expert loads in call order, and the indexer's divergence terms.

    A scored layer's attention follows its scores directly, so `pending` links the two.
    """

    loads: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)
    pending: Tensor | None = None

    def clear(self) -> None:
        """Forget everything of the last forward."""
        self.loads.clear()
        self.index_losses.clear()
        self.pending = None


class _StraightThrough(torch.autograd.Function):
    """The quantised value forward, the gradient of the identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantised: Tensor) -> Tensor:
        return quantised

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(quantised: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """A fake quantiser that passes gradients."""

    def apply(x: Tensor, group: int) -> Tensor:
        with torch.no_grad():
            values = quantised(x, group)
        return _StraightThrough.apply(x, values)

    return apply


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[T, K] x [N, K]^T in the dtype of `x`."""
    return F.linear(x, weight.to(x.dtype))


def quantise_blocks(weight: Tensor, side: int) -> Tensor:
    """fp8 e4m3 and back with one power-of-two scale per `side` x `side` block of [N, K]; N and K in whole blocks."""
    blocks = weight.unflatten(1, (-1, side)).unflatten(0, (-1, side))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp_(min=1e-12)
    scale = quantise.power_of_two_ceiling(amax / quantise.FP8_MAX)
    codes = (blocks / scale).clamp_(-quantise.FP8_MAX, quantise.FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(2).flatten(0, 1)


def stored_values(weight: Tensor, storage: str) -> Tensor:
    """The values that a weight will have on disk, with the gradient of the identity."""
    with torch.no_grad():
        if storage == Storage.FP8_BLOCK:
            values = quantise_blocks(weight, WEIGHT_BLOCK)
        elif storage == Storage.FP4_GROUP:
            values = quantise.quantise_fp4(weight, FP4_GROUP)
        elif storage == Storage.FP8_ROW:
            values = quantise.quantise_fp8(weight, FP4_GROUP)
        else:
            values = weight.to(torch.bfloat16).to(weight.dtype)
    return _StraightThrough.apply(weight, values)


def masked_softmax(scores: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Weights [B, H, Q, N] over keys with a sink [H] in the denominator; mask [B or 1, Q, N] is True for a key."""
    logits = (scores.float() * scale).masked_fill(~mask.unsqueeze(1), float("-inf"))
    sink = sink.view(1, -1, 1, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), sink).detach()
    weights = torch.exp(logits - top)
    return (weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top))).to(scores.dtype)


def index_divergence(scores: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """KL divergence of the indexer's softmax from the attention's mass over compressed rows, mean over queries.

    Args:
        scores: [B, Q, C] index scores. weights: [B, H, Q, C] attention weights. mask: [B or 1, Q, C].
    """
    mass = weights.detach().float().sum(1).masked_fill(~mask, 0.0)
    total = mass.sum(-1, keepdim=True)
    goal = mass / total.clamp(min=1e-6)
    logits = scores.float().masked_fill(~mask, -1e4)
    logits = logits - torch.logsumexp(logits, -1, keepdim=True)
    divergence = (goal * (torch.log(goal.clamp(min=1e-9)) - logits)).sum(-1)
    used = (total.squeeze(-1) > 1e-4).float()
    return (divergence * used).sum() / used.sum().clamp(min=1.0)


@dataclass(frozen=True)
class DenseOps:
    """The ops that need to know the recorder; their elementwise parts are given, fused or not."""

    recorder: Recorder
    softmax: Callable[..., Tensor]
    divergence: Callable[..., Tensor]
    expert_inner: Callable[..., Tensor]

    def sparse_attention(self, q: Tensor, sources: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
        """Dense attention under masks.

        Args:
            q: [B * Q, H, K]. sources: pairs (rows [B * N, K], mask [B or 1, Q, N] bool), see `SequenceView`.
        """
        num_queries = sources[0][1].shape[1]
        batch = q.shape[0] // num_queries
        keys = torch.cat([rows.view(batch, -1, rows.shape[-1]).to(q.dtype) for rows, _ in sources], dim=1)
        mask = torch.cat([part.expand(batch, -1, -1) for _, part in sources], dim=2)
        queries = q.view(batch, num_queries, *q.shape[1:]).transpose(1, 2)
        scores = torch.matmul(queries, keys.unsqueeze(1).transpose(2, 3))
        weights = self.softmax(scores, mask, sink, scale)
        self._record_divergence(weights, sources)
        out = torch.matmul(weights, keys.unsqueeze(1))
        return out.transpose(1, 2).reshape(q.shape)

    def _record_divergence(self, weights: Tensor, sources: list[tuple[Tensor, Tensor]]) -> None:
        scores, self.recorder.pending = self.recorder.pending, None
        if scores is None or len(sources) < 2:
            return
        mask = sources[1][1]
        compressed = weights[..., -mask.shape[-1] :]
        self.recorder.index_losses.append(self.divergence(scores, compressed, mask))

    def index_scores(self, q: Tensor, sums: Tensor, column: int, keys: IndexKeys) -> Tensor:
        """Scores [B * S, C] of every window's queries against its own compressed rows, window by window in `keys`.

        The picks carry no gradient; the scores learn from the divergence that the next attention records.
        """
        batch, weights = keys.places.shape[0], index.head_weights(q, sums, column)
        rows = keys.rows.view(batch, -1, keys.rows.shape[-1])
        queries = q.view(batch, -1, *q.shape[1:])
        product = torch.einsum("bqhk,bck->bqhc", queries, rows.to(q.dtype)).relu()
        scores = torch.einsum("bqhc,bqh->bqc", product.float(), weights.view(batch, -1, weights.shape[-1]))
        self.recorder.pending = scores
        return scores.detach().flatten(0, 1)

    def routed_experts(
        self, x: Tensor, route: Route, w13: Tensor, w2: Tensor, limit: float, quantise: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Every expert for every row, weighted with zero where not chosen: static shapes, no atomics."""
        num_experts, double, width = w13.shape
        share = x.new_zeros(x.shape[0], num_experts, dtype=torch.float32)
        share = share.scatter(1, route.expert_ids, route.weights)
        self.recorder.loads.append(share.detach().gt(0).float().sum(0))
        projected = F.linear(x, w13.reshape(-1, width).to(x.dtype)).view(-1, num_experts, double)
        inner = quantise(self.expert_inner(projected, share, limit).to(x.dtype).flatten(1))
        return F.linear(inner, w2.transpose(0, 1).reshape(w2.shape[1], -1).to(x.dtype)).float()


def expert_inner(projected: Tensor, share: Tensor, limit: float) -> Tensor:
    """silu(gate) * up * weight for every expert: [T, E, 2F], [T, E] -> [T, E, F] float32."""
    return experts.gate_and_up(projected, limit) * share.unsqueeze(-1)


def training_ops(recorder: Recorder, compiled: bool) -> OpSet:
    """The op set for training; `compiled` fuses elementwise ops with the compiler (CUDA)."""

    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if compiled else function

    dense = DenseOps(recorder, fuse(masked_softmax), fuse(index_divergence), fuse(expert_inner))
    gate, norm_rows, turn = fuse(experts.gate_and_up), fuse(norm.rms_norm), fuse(rope.apply_rope)
    fp8, rstd, mix = straight_through(fuse(quantise.quantise_fp8)), fuse(hyper.stream_rstd), fuse(hyper.mix_streams)
    collapse, expand = fuse(hyper.collapse_streams), fuse(hyper.expand_streams)
    reader = hyper.StreamReader(linear, rstd, mix, collapse, expand, norm_rows, fp8)
    quantisers = {
        "fp8": fp8,
        "fp4": straight_through(fuse(quantise.quantise_fp4)),
        "fp4_e4m3": straight_through(fuse(quantise.quantise_fp4_e4m3)),
    }
    kept = kept_rows.RowOps(norm_rows, turn, quantisers, fuse(compress.pool_groups))
    return replace(
        TORCH_OPS,
        name="training",
        linear=linear,
        linear_wide=lambda x, weight: linear(x.float(), weight),
        grouped_linear=grouped_linear_of(linear, fp8),
        confidence_logits=confidence_logits_of(linear),
        attend=attention.attend_of(norm_rows, turn, dense.sparse_attention),
        linear_terms=linear,
        shared_expert=experts.shared_expert_of(linear, gate),
        mixture=experts.mixture_of(dense.routed_experts),
        index_scores=dense.index_scores,
        quantise_fp8=fp8,
        stored=stored_values,
        rms_norm=norm_rows,
        joint_sums=kept_rows.joint_sums_of(linear),
        form_rows=kept.form_rows,
        key_rows=kept.key_rows,
        latents=kept.latents,
        keep_rows=kept.keep_rows,
        compress=kept.compress,
        read_streams=reader.read_streams,
        read_head=reader.read_head,
        collapse_streams=collapse,
        expand_streams=expand,
        mean_streams=fuse(hyper.mean_streams),
        engram_add=fuse(engram.engram_add),
        route_rows=route.route_rows_of(lambda x, weight: linear(x.float(), weight)),
    )
