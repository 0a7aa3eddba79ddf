"""Engram: hashed n-grams of recent tokens look up rows of a large table, gated into every residual stream."""

import torch
from torch import Tensor

from dspark.ops.elementwise import sigmoid
from dspark.ops.table import StoredTable, table_rows


def hash_ngrams(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of the n-grams that end at each row.

    A running XOR of token * multiplier; after lookback i it is reduced modulo the primes of the (i+1)-gram heads.

    Args:
        ngrams: [T, n] int64 compressed token ids, column 0 the row's own token, then its predecessors.
        multipliers: [n] int64. primes, offsets: [n - 1, heads] int64.
    Returns:
        [T, (n - 1) * heads] int64 table rows, n-gram-major.
    """
    hashed = ngrams[:, 0] * multipliers[0]
    columns = []
    for back in range(1, ngrams.shape[1]):
        hashed = hashed ^ (ngrams[:, back] * multipliers[back])
        columns.append(hashed.unsqueeze(-1) % primes[back - 1] + offsets[back - 1])
    return torch.cat(columns, dim=-1)


def engram_rows(
    table: Tensor | StoredTable, ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Table rows [T, (n - 1) * heads, K] of the n-grams that end at each row; arguments as for `hash_ngrams`.

    Args:
        table: [N, K], see `dspark.ops.table`.
    """
    return table_rows(table, hash_ngrams(ngrams, multipliers, primes, offsets))


def engram_gate(streams: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gate [T, S] of each stream: signed square root of the normalised product with the key, through a sigmoid.

    Args:
        streams: [T, S, D]. key: [T, S, D]. weight: [S, D], product of the query and key weights.
        eps: added to the mean squares of both sides.
    """
    wide, key = streams.float(), key.float()
    product = (wide * (weight * key)).sum(-1)
    rstd = (wide.square().mean(-1) + eps).rsqrt() * (key.square().mean(-1) + eps).rsqrt()
    logit = product * rstd * streams.shape[-1] ** -0.5
    return sigmoid(torch.sign(logit) * logit.abs().clamp(min=1e-6).sqrt())


def engram_add(streams: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Streams [T, S, D] with the value added to each, times its gate.

    Args:
        streams: [T, S, D]. projected: [T, (S + 1) * D], a key for each stream and then the value.
        q_weight, k_weight: [S, D]. eps: see `engram_gate`.
    """
    _, size, width = streams.shape
    keys, value = projected.split((size * width, width), dim=1)
    gate = engram_gate(streams, keys.unflatten(1, (size, width)), q_weight * k_weight, eps)
    return (streams.float() + gate.unsqueeze(-1) * value.float().unsqueeze(1)).to(streams.dtype)
