"""Adjusted logits to tokens: the keyed draw, and the distribution that the ratio sampler tests against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.ops.draw import filtered
from dspark.ops.filters import probability_mass
from dspark.ops.opset import ops_for
from dspark.sampling.adjust import adjust_logits, narrow_vocabulary
from dspark.sampling.batch import SamplingBatch
from dspark.sampling.rows import RowSampling


def draw(
    logits: Tensor,
    rows: Sequence[RowSampling] | SamplingBatch,
    *,
    num_valid_tokens: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Draw one token a row: the argmax of filtered logits + temperature * gumbel(seed, position).

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
    adjusted = logits if batch.adjustments is None and mask is None else adjust_logits(logits, batch, mask)
    ops, sampled = ops_for(logits.device), batch.sampled
    if sampled is None:
        return ops.best_tokens(adjusted)
    return ops.draw_rows(adjusted, sampled.owners, sampled.positions, sampled.params, sampled.kind)


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
    best = ops_for(logits.device).best_tokens(adjusted)
    probabilities = torch.zeros_like(adjusted, dtype=torch.float64).scatter_(1, best[:, None], 1.0)
    if batch.sampled is None:
        return probabilities
    mass = probability_mass(filtered(adjusted, batch.sampled.params))
    total = mass.sum(-1, keepdim=True).to(torch.float64)
    is_greedy = batch.sampled.params.temperature[:, None] == 0.0
    return torch.where(is_greedy, probabilities, mass.to(torch.float64) / total)


def _as_batch(rows: Sequence[RowSampling] | SamplingBatch, logits: Tensor) -> SamplingBatch:
    """Pack row contexts unless the caller already has."""
    if isinstance(rows, SamplingBatch):
        return rows
    return SamplingBatch.build(rows, logits.shape[1], logits.device)
