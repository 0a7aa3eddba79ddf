"""Manifold-constrained hyper-connections: several residual streams, mixed by small learned matrices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.elementwise import sigmoid
from dspark.ops.experts import Output, sum_terms
from dspark.ops.linear import linear
from dspark.ops.norm import rms_norm
from dspark.ops.quantise import quantise_fp8


class StreamMix(NamedTuple):
    """pre [T, S]: weights of the collapse. post [T, S]: weights of the write-back. comb [T, S, S]: stream i to j."""

    pre: Tensor
    post: Tensor
    comb: Tensor


class Residual(NamedTuple):
    """Residual streams between two halves of blocks.

    streams: [T, S, D] before `pending` is written. carried: [T, S] pre-weights of the half before. pending: output
    [T, D] of that half and the mix that writes it; the next reader does so. None where the streams are whole.
    """

    streams: Tensor
    carried: Tensor
    pending: tuple[Output, StreamMix] | None = None


class HalfInput(NamedTuple):
    """What a half reads: x [T, D] normalised and the same quantised; whole streams and the mix that take its output."""

    x: Tensor
    quantised: Tensor
    streams: Tensor
    mix: StreamMix

    def leave(self, output: Output) -> Residual:
        """The residual after the half, its output [T, D] still to be written."""
        return Residual(self.streams, self.mix.pre, (output, self.mix))


def stream_rstd(flat: Tensor, eps: float) -> Tensor:
    """Reciprocal RMS [T, 1] of flattened streams [T, S*D]; mix logits are scaled by it after their projection."""
    return (flat.square().mean(-1, keepdim=True) + eps).rsqrt()


def mix_streams(
    logits: Tensor, scale: Tensor, base: Tensor, num_streams: int, iterations: int, eps: float
) -> StreamMix:
    """Turn mix logits [T, (2 + S) * S] into pre, post and a doubly stochastic comb (Sinkhorn).

    Args:
        scale: [3] for pre, post and comb. base: [(2 + S) * S].
        iterations: row and column normalisations; the first column step counts as one.
        eps: added to pre, to comb's entries and to each denominator.
    """
    size = num_streams
    scaled = logits * scale.repeat_interleave(_section_sizes(size, scale.device)) + base
    pre, post = sigmoid(scaled[:, : 2 * size]).split(size, dim=-1)
    pre, post = pre + eps, 2.0 * post
    comb = torch.softmax(scaled[:, 2 * size :].unflatten(-1, (size, size)), dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return StreamMix(pre, post, comb)


@lru_cache(maxsize=16)
def _section_sizes(num_streams: int, device: torch.device) -> Tensor:
    """Logits that share a scale: pre, post, comb."""
    with torch.inference_mode(False):
        return torch.tensor([num_streams, num_streams, num_streams * num_streams], device=device)


def head_mix(logits: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """Collapse weights [T, S] of a final mix without Sinkhorn: sigmoid(logits * scale + base) + eps."""
    return sigmoid(logits * scale + base) + eps


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum over streams: [T, S, D], [T, S] -> [T, D] in the streams' dtype."""
    return (streams.float() * pre.unsqueeze(-1)).sum(1).to(streams.dtype)


@dataclass(frozen=True)
class StreamReader:
    """Reading of residual streams from the parts of one set of twins: ops of this file and of its neighbours."""

    product: Callable[[Tensor, Tensor], Tensor]
    rstd: Callable[[Tensor, float], Tensor]
    mix: Callable[..., StreamMix]
    collapse: Callable[[Tensor, Tensor], Tensor]
    expand: Callable[[Output, Tensor, StreamMix], Tensor]
    norm: Callable[[Tensor, Tensor | None, float], Tensor]
    quantise: Callable[[Tensor, int], Tensor]

    def read_streams(
        self,
        residual: Residual,
        is_shifted: bool,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        norm_weight: Tensor,
        iterations: int,
        eps: float,
        stream_eps: float,
        norm_eps: float,
        group: int,
    ) -> HalfInput:
        """Write what is pending, then make a half's input and the mix that writes its output back.

        Args:
            is_shifted: collapse with the pre-weights that are carried, not with the own ones.
            fn: [(2 + S) * S, S * D] projection to mix logits. scale, base, iterations, eps: see `mix_streams`.
            norm_weight: [D]. stream_eps, norm_eps: added to the mean squares of streams and of the collapsed row.
            group: columns that share a scale of the quantised input; 0 where nothing is quantised.
        """
        streams = written_streams(residual, self.expand)
        own = self.mix(self._logits(streams, fn, stream_eps), scale, base, streams.shape[1], iterations, eps)
        x = self.norm(self.collapse(streams, residual.carried if is_shifted else own.pre), norm_weight, norm_eps)
        return HalfInput(x, self.quantise(x, group) if group else x, streams, own)

    def read_head(
        self,
        residual: Residual,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        norm_weight: Tensor,
        eps: float,
        stream_eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, Tensor]:
        """The last collapse with weights of its own, fn [S, S * D]: [T, D] as it is, and normalised."""
        streams = written_streams(residual, self.expand)
        hidden = self.collapse(streams, head_mix(self._logits(streams, fn, stream_eps), scale, base, eps))
        return hidden, self.norm(hidden, norm_weight, norm_eps)

    def _logits(self, streams: Tensor, fn: Tensor, eps: float) -> Tensor:
        flat = streams.flatten(1).float()
        return self.product(flat, fn) * self.rstd(flat, eps)


def mean_streams(streams: Tensor) -> Tensor:
    """Mean over streams: [T, S, D] -> [T, D] in the streams' dtype."""
    return streams.float().mean(1).to(streams.dtype)


def expand_streams(output: Output, streams: Tensor, mix: StreamMix) -> Tensor:
    """Write a half's output back: out[j] = post[j] * output + sum_i comb[i, j] * streams[i] -> [T, S, D]."""
    written = mix.post.unsqueeze(-1) * sum_terms(output).float().unsqueeze(1)
    carried = (mix.comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)
    return (written + carried).to(streams.dtype)


def written_streams(residual: Residual, expand: Callable[[Output, Tensor, StreamMix], Tensor]) -> Tensor:
    """Streams [T, S, D] after what is pending."""
    if residual.pending is None:
        return residual.streams
    output, mix = residual.pending
    return expand(output, residual.streams, mix)


def embed_streams(weight: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding copied into every stream: [V, D], [T] -> [T, S, D]."""
    return weight[token_ids].to(dtype).unsqueeze(1).repeat(1, num_streams, 1)


TORCH_READER = StreamReader(linear, stream_rstd, mix_streams, collapse_streams, expand_streams, rms_norm, quantise_fp8)
