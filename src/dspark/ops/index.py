"""Scores of compressed rows for the indexer, and the choice of rows; ties go to the lower index."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.kept_rows import added
from dspark.ops.linear import linear

SCORE_CHUNK = 64


class IndexKeys(NamedTuple):
    """Index keys of the requests of a pass.

    rows: [N, K], a store. places: [R, C] int64, rows of each request's keys in order, then -1; C in whole
    SCORE_CHUNKs. owners: [T] int64, the request of each query; a request's queries lie together.
    """

    rows: Tensor
    places: Tensor
    owners: Tensor


def head_weights(q: Tensor, sums: Tensor, column: int) -> Tensor:
    """Weights [T, H] float32 of the heads of q [T, H, K]: columns of sums [sections, T, N], scaled; may be negative."""
    heads, size = q.shape[1:]
    return added(sums, column, heads, q.dtype).float() * (size**-0.5 * heads**-0.5)


def index_scores(q: Tensor, sums: Tensor, column: int, keys: IndexKeys) -> Tensor:
    """Score of every compressed row of its request for every query: sum over heads of weight * relu(q . k).

    Args:
        q: [T, H, K]. sums, column: see `head_weights`.
    Returns:
        [T, C] float32; beyond a request's own keys the scores are zero.
    """
    weights = head_weights(q, sums, column)
    scores = q.new_zeros(q.shape[0], keys.places.shape[1], dtype=torch.float32)
    counts = torch.bincount(keys.owners, minlength=keys.places.shape[0]).tolist()
    for places, own_q, own_weights, own_scores in zip(
        keys.places, q.split(counts), weights.split(counts), scores.split(counts), strict=True
    ):
        flat = own_q.float().flatten(0, 1)
        for start in range(0, int((places >= 0).sum()), SCORE_CHUNK):
            chunk = places[start : start + SCORE_CHUNK]
            rows = keys.rows[chunk.clamp(min=0)].float().masked_fill_((chunk < 0).unsqueeze(-1), 0.0)
            product = linear(flat, rows).clamp_(min=0).view(-1, q.shape[1], SCORE_CHUNK)
            own_scores[:, start : start + SCORE_CHUNK] = (product * own_weights.unsqueeze(-1)).sum(1)
    return scores


def pick_rows(scores: Tensor, visible: Tensor, candidates: Tensor | None, count: int) -> Tensor:
    """The `count` best rows of each query that it sees, ascending, -1 where there are fewer.

    Args:
        scores: [T, C]. visible: [T] int64, rows that each query sees. count: rows to pick.
        candidates: [T, C or more] bool, rows to choose from; None for all.
    Returns:
        [T, count] int64.
    """
    allowed = torch.arange(scores.shape[1], device=scores.device) < visible.unsqueeze(-1)
    if candidates is not None:
        allowed = allowed & candidates[:, : scores.shape[1]]
    if scores.shape[1] < count:
        missing = count - scores.shape[1]
        scores, allowed = F.pad(scores, (0, missing)), F.pad(allowed, (0, missing))
    # A score of minus infinity is the lowest there is, and still above rows that may not be picked.
    ranked = scores.clamp(min=torch.finfo(scores.dtype).min).masked_fill_(~allowed, float("-inf"))
    ranked = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    picks = ranked[:, :count]
    none = scores.shape[1]
    picks = torch.where(allowed.gather(1, picks), picks, none).sort(-1).values
    return torch.where(picks < none, picks, -1)


def candidate_rows(scores: Tensor, visible: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Rows of the best candidate blocks: a block is worth its best visible row; the newest block always counts.

    Args:
        scores: [T, C]. visible: [T] rows that each query may see.
        block_size: rows a block. num_blocks: blocks to keep, the newest visible one included.
    Returns:
        [T, C] bool, visible rows inside the kept blocks.
    """
    num_rows = scores.shape[1]
    seen = torch.arange(num_rows, device=scores.device) < visible.unsqueeze(-1)
    padded = F.pad(scores.masked_fill(~seen, float("-inf")), (0, -num_rows % block_size), value=float("-inf"))
    worth = padded.unflatten(-1, (-1, block_size)).amax(-1)
    newest = ((visible - 1).clamp(min=0) // block_size).unsqueeze(-1)
    worth = worth.scatter(1, newest, float("inf"))
    best = torch.sort(worth, dim=-1, descending=True, stable=True).indices[:, :num_blocks]
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return kept.repeat_interleave(block_size, dim=-1)[:, :num_rows] & seen
