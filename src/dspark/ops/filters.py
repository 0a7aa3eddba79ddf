"""Filters of logits in one fixed order: temperature, min-p, top-k, top-p; each acts on what those before it left.

Every reduction is a maximum, a sort, or a sum of integers, none of which depends on the order of evaluation; with
element-wise arithmetic for the rest, a row's bits depend on that row alone on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASS_UNIT = float(1 << 40)
"""Fixed-point one: probability masses are integers, so their sums are exact. V <= 2**22 cannot overflow int64."""

CANDIDATES = 256
"""Best logits that top-k and top-p look at before they sort a whole row."""


def filter_logits(logits: Tensor, temperature: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Apply temperature, min-p, top-k and top-p.

    Args:
        logits: [T, V] float32.
        temperature: [T] float32; 0 counts as 1, which keeps the best token as every filter does.
        log_min_p: [T] float32, -inf where off.
        top_k: [T] int64, 0 where off.
        top_p: [T] float64, 1 where off.
    Returns:
        [T, V] float32: 0 at a row's best token, -inf where a token is excluded.
    """
    # Subtracting the maximum first keeps tiny temperatures finite at the best token.
    divisor = torch.where(temperature > 0.0, temperature, 1.0)[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / divisor
    scaled = scaled.masked_fill(scaled < log_min_p[:, None], -torch.inf)
    kept = best_mask(scaled, *_top_cut(scaled, top_k, top_p))
    return scaled.masked_fill(~kept, -torch.inf)


def probability_mass(scaled: Tensor) -> Tensor:
    """exp of scaled logits (maximum 0) in units of 1 / MASS_UNIT: [.., V] int64."""
    return (scaled.exp().to(torch.float64) * MASS_UNIT).round_().to(torch.int64)


def best_mask(values: Tensor, sizes: Tensor, cut_values: Tensor) -> Tensor:
    """Mark the `sizes` largest values of each row, ties to the lower id.

    Args:
        values: [N, V] float32.
        sizes: [N] int64, at least 1.
        cut_values: [N] float32, the value at rank `sizes`.
    Returns:
        [N, V] bool.
    """
    cut = cut_values[:, None]
    better = values > cut
    tied = values == cut
    room = sizes[:, None] - better.sum(-1, keepdim=True)
    return better | (tied & (tied.cumsum(-1) <= room))


def _top_cut(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sizes [N], cut values [N]) of the set that top-k, then top-p keep.

    Both depend on the sorted values only: tied tokens have equal mass, so their order moves no cut. A row whose cut
    lies beyond the CANDIDATES best values is sorted whole, with the same answer.
    """
    vocab_size = scaled.shape[1]
    total = probability_mass(scaled).sum(-1)
    values = scaled.topk(min(CANDIDATES, vocab_size), dim=-1).values
    sizes, is_covered = _count_kept(values, total, top_k, top_p, vocab_size)
    cuts = _value_at_rank(values, sizes)
    rest = (~is_covered).nonzero()[:, 0]
    if rest.numel():
        values = scaled[rest].sort(dim=-1, descending=True).values
        sizes[rest], _ = _count_kept(values, total[rest], top_k[rest], top_p[rest], vocab_size)
        cuts[rest] = _value_at_rank(values, sizes[rest])
    # A row that keeps everything has no cut; its rank may lie beyond the candidates.
    return sizes, cuts.masked_fill(sizes == vocab_size, -torch.inf)


def _value_at_rank(values: Tensor, ranks: Tensor) -> Tensor:
    """Pick values[n, ranks[n] - 1] of rows [N, C]; ranks beyond C read the last value."""
    return values.gather(1, ranks.clamp(max=values.shape[1])[:, None] - 1)[:, 0]


def _count_kept(values: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Count kept tokens given the best values [N, C] in descending order; say whether C values sufficed."""
    num_candidates = values.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    mass = probability_mass(values)
    cumulative = mass.cumsum(-1)
    # Where top-k cuts, top-p is a share of what top-k left.
    total = torch.where(limit < vocab_size, _value_at_rank(cumulative, limit), total)
    # A token stays while the mass before it is short of top_p: the smallest set that reaches top_p.
    short = (cumulative - mass).to(torch.float64) < (top_p * total.to(torch.float64))[:, None]
    nucleus = torch.where(top_p < 1.0, short.sum(-1).clamp(min=1), vocab_size)
    sizes = torch.minimum(limit, nucleus)
    keeps_all = (limit == vocab_size) & (top_p >= 1.0)
    return sizes, (limit <= num_candidates) | keeps_all | ((limit == vocab_size) & (sizes < num_candidates))
