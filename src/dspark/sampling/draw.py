"""Filtered logits to tokens: the keyed draw, and the distribution that the ratio sampler tests against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.sampling.batch import SamplingBatch
from dspark.sampling.filters import (
    adjust_logits,
    filter_logits,
    narrow_vocabulary,
    probability_mass,
)
from dspark.sampling.noise import gumbel_noise
from dspark.sampling.rows import RowSampling


def draw(
    logits: Tensor,
    rows: Sequence[RowSampling] | SamplingBatch,
    *,
    num_valid_tokens: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Draw one token a row: argmax(filtered logits + gumbel(seed, position)), or the argmax at temperature 0.

    A row's token depends on that row and its context only. Ties go to the lower id.

    Args:
        logits: [T, V], any float type.
        rows: the T contexts, or a batch built for min(V, num_valid_tokens) columns.
        num_valid_tokens: real vocabulary size; columns from here on are padding and never drawn.
        mask: [T, V] bool, True where a token is allowed.
    Returns:
        [T] int64.
    """
    logits = narrow_vocabulary(logits, num_valid_tokens)
    batch = _as_batch(rows, logits)
    if batch.is_plain_greedy and mask is None:
        return logits.argmax(-1)
    adjusted = adjust_logits(logits, batch, mask)
    sampled = batch.sampled
    if sampled is None:
        return adjusted.argmax(-1)
    filtered = filter_logits(adjusted[sampled.index], sampled)
    noise = gumbel_noise(sampled.seeds, sampled.positions, logits.shape[1], streams=sampled.streams)
    drawn = (filtered + noise).argmax(-1)
    if drawn.shape[0] == batch.num_rows:
        return drawn
    return adjusted.argmax(-1).index_copy(0, sampled.index, drawn)


def filtered_probabilities(
    logits: Tensor,
    rows: Sequence[RowSampling] | SamplingBatch,
    *,
    num_valid_tokens: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The distribution that `draw` samples from; one-hot at temperature 0.

    Args: as `draw`.
    Returns:
        [T, V] float64 (V without padding), rows sum to 1 within rounding. Masses below 2**-41 of the best are 0.
    """
    logits = narrow_vocabulary(logits, num_valid_tokens)
    batch = _as_batch(rows, logits)
    adjusted = adjust_logits(logits, batch, mask)
    probabilities = torch.zeros_like(adjusted, dtype=torch.float64)
    probabilities.scatter_(1, adjusted.argmax(-1, keepdim=True), 1.0)
    if batch.sampled is None:
        return probabilities
    mass = probability_mass(filter_logits(adjusted[batch.sampled.index], batch.sampled))
    total = mass.sum(-1, keepdim=True).to(torch.float64)
    return probabilities.index_copy_(0, batch.sampled.index, mass.to(torch.float64) / total)


def _as_batch(rows: Sequence[RowSampling] | SamplingBatch, logits: Tensor) -> SamplingBatch:
    """Pack row contexts unless the caller already has."""
    if isinstance(rows, SamplingBatch):
        return rows
    return SamplingBatch.build(rows, logits.shape[1], logits.device)
