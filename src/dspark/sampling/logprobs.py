"""Log-probabilities of the raw target row, before any filter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.filters import MASS_UNIT, best_mask, probability_mass
from dspark.sampling.adjust import narrow_vocabulary


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of T rows.

    Attributes:
        token: [T] float32, of the token that the row emitted.
        rank: [T] int64, its place among all ids, 1 for the best; ties to the lower id.
        top_ids: [T, K] int64, the K best ids, best first, ties to the lower id.
        top: [T, K] float32, their log-probabilities.
    """

    token: Tensor
    rank: Tensor
    top_ids: Tensor
    top: Tensor


def logprobs(logits: Tensor, token_ids: Tensor, top: int = 0, *, num_valid_tokens: int | None = None) -> Logprobs:
    """Log-softmax of each raw row at the emitted token and at the `top` best ids.

    The normaliser is a sum of fixed-point integers, exact in any order, so a row's bits depend on that row alone.

    Args:
        logits: [T, V], any float type: the target rows that emitted the tokens.
        token_ids: [T] int64.
        top: K, number of best alternatives; 0 for none.
        num_valid_tokens: real vocabulary size; padding columns have no probability.
    """
    raw = narrow_vocabulary(logits, num_valid_tokens).to(torch.float32)
    shifted = raw - raw.amax(-1, keepdim=True)
    total = probability_mass(shifted).sum(-1, keepdim=True).to(torch.float64) / MASS_UNIT
    normaliser = total.log().to(torch.float32)
    top_ids = best_ids(shifted, min(top, raw.shape[1]))
    own = shifted.gather(1, token_ids[:, None])
    is_lower_id = torch.arange(raw.shape[1], device=raw.device) < token_ids[:, None]
    return Logprobs(
        token=(own - normaliser)[:, 0],
        rank=1 + ((shifted > own) | ((shifted == own) & is_lower_id)).sum(-1),
        top_ids=top_ids,
        top=shifted.gather(1, top_ids) - normaliser,
    )


def best_ids(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values of each row [T, V], best first, ties to the lower id."""
    if count == 0:
        return torch.empty(values.shape[0], 0, dtype=torch.int64, device=values.device)
    cut = values.topk(count, dim=-1).values[:, -1]
    sizes = torch.full_like(cut, count, dtype=torch.int64)
    ids = best_mask(values, sizes, cut).nonzero()[:, 1].view(values.shape[0], count)
    order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
