"""What changes logits before anything is filtered or drawn: mask, logit bias, penalties, in this order.

It decides greedy rows too. Repetition looks at prompt and output, presence and frequency at the output only; drafts
before the row count as output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.sampling.batch import SamplingBatch
from dspark.sampling.penalties import Adjustments


def narrow_vocabulary(logits: Tensor, num_valid_tokens: int | None) -> Tensor:
    """Drop the columns of a padded vocabulary: [T, V] -> [T, num_valid_tokens]."""
    return logits if num_valid_tokens is None else logits[:, :num_valid_tokens]


def adjust_logits(logits: Tensor, batch: SamplingBatch, mask: Tensor | None = None) -> Tensor:
    """Apply mask, logit bias and penalties.

    Args:
        logits: [T, V], any float type; not changed.
        batch: the T rows.
        mask: [T, V] bool, True where a token is allowed, or None. Every row must allow a token.
    Returns:
        [T, V] float32.
    """
    adjusted = logits.to(torch.float32)
    if mask is not None:
        adjusted = adjusted.masked_fill(~mask[:, : adjusted.shape[1]], -torch.inf)
    if batch.adjustments is None:
        return adjusted
    changed = _apply(adjusted[batch.adjustments.rows], batch.adjustments)
    return adjusted.index_copy(0, batch.adjustments.rows, changed)


def _apply(logits: Tensor, adjustments: Adjustments) -> Tensor:
    """Bias and penalties on the rows [P, V] that have them."""
    if adjustments.bias is not None:
        index, tokens, values = adjustments.bias
        logits = logits.index_put((index, tokens), values, accumulate=True)
    if adjustments.seen is None or adjustments.output_counts is None:
        return logits
    weaker = torch.where(logits > 0, logits / adjustments.repetition, logits * adjustments.repetition)
    logits = torch.where(adjustments.seen, weaker, logits)
    counts = adjustments.output_counts
    return logits - adjustments.frequency * counts - adjustments.presence * (counts > 0)
