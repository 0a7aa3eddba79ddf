"""Manifold-constrained hyper-connections: several residual streams, mixed by small learned matrices."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.elementwise import sigmoid
from dspark.ops.linear import linear
from dspark.ops.norm import rms_norm


class StreamMix(NamedTuple):
    """pre [T, S]: weights of the collapse. post [T, S]: weights of the write-back. comb [T, S, S]: stream i to j."""

    pre: Tensor
    post: Tensor
    comb: Tensor


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
    return torch.tensor([num_streams, num_streams, num_streams * num_streams], device=device)


def head_mix(logits: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """Collapse weights [T, S] of a final mix without Sinkhorn: sigmoid(logits * scale + base) + eps."""
    return sigmoid(logits * scale + base) + eps


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum over streams: [T, S, D], [T, S] -> [T, D] in the streams' dtype."""
    return (streams.float() * pre.unsqueeze(-1)).sum(1).to(streams.dtype)


def read_streams_of(
    product: Callable[[Tensor, Tensor], Tensor],
    rstd: Callable[[Tensor, float], Tensor],
    mix: Callable[..., StreamMix],
    collapse: Callable[[Tensor, Tensor], Tensor],
    norm: Callable[..., Tensor],
) -> Callable[..., tuple[Tensor, StreamMix]]:
    """Reading of a half's input from its parts: `linear` and the ops of this file and of `norm` of one set of twins."""

    def read_streams(
        streams: Tensor,
        carried: Tensor | None,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        norm_weight: Tensor,
        iterations: int,
        eps: float,
        stream_eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, StreamMix]:
        """A half's normalised input, and the mix that writes its output back.

        Args:
            streams: [T, S, D]. carried: [T, S] pre-weights of the half before, or None to collapse with the own ones.
            fn: [(2 + S) * S, S * D] projection to mix logits. scale, base, iterations, eps: see `mix_streams`.
            norm_weight: [D]. stream_eps, norm_eps: added to the mean squares of streams and of the collapsed row.
        Returns:
            [T, D] in the streams' dtype, and the mix.
        """
        flat = streams.flatten(1).float()
        logits = product(flat, fn) * rstd(flat, stream_eps)
        own = mix(logits, scale, base, streams.shape[1], iterations, eps)
        return norm(collapse(streams, own.pre if carried is None else carried), norm_weight, norm_eps), own

    return read_streams


read_streams = read_streams_of(linear, stream_rstd, mix_streams, collapse_streams, rms_norm)


def mean_streams(streams: Tensor) -> Tensor:
    """Mean over streams: [T, S, D] -> [T, D] in the streams' dtype."""
    return streams.float().mean(1).to(streams.dtype)


def expand_streams(output: Tensor, streams: Tensor, mix: StreamMix) -> Tensor:
    """Write a half's output back: out[j] = post[j] * output + sum_i comb[i, j] * streams[i] -> [T, S, D]."""
    written = mix.post.unsqueeze(-1) * output.float().unsqueeze(1)
    carried = (mix.comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)
    return (written + carried).to(streams.dtype)
