"""The ratio test: accept a draft with min(1, target / draft), else draw from the residual; and its block form.

It keeps the target's distribution, not its tokens. Its randomness is keyed by (seed, anchor position), which no two
rounds of a request share, so nothing that a round has looked at decides a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops.noise import Stream, gumbel_noise, keyed_uniform

_SUM_UNIT = float(1 << 52)


@dataclass(frozen=True, slots=True)
class RatioBatch:
    """R requests for the ratio test, N drafts and T = N + R target rows in all, requests one after the other.

    Attributes:
        target: [T, V] float64, filtered target distributions.
        draft: [N, V] float64, filtered draft distributions; one-hot where a draft was an argmax or given.
        draft_ids: for each request its verify_len drafts.
        seeds, anchor_positions: [R] int64, key of the randomness.
    """

    target: Tensor
    draft: Tensor
    draft_ids: Sequence[Sequence[int]]
    seeds: Tensor
    anchor_positions: Tensor

    @property
    def widths(self) -> list[int]:
        """verify_len of each request."""
        return [len(ids) for ids in self.draft_ids]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the test knows of each request before it draws.

    Attributes:
        chances: for each request v numbers, see the functions that fill them.
        weights: for each request v + 1 numbers: the target's weight in the residual after k accepted drafts.
    """

    chances: list[list[float]]
    weights: list[list[float]]


def decide_by_ratio(batch: RatioBatch, method: str) -> list[list[int]]:
    """Return for each request its accepted drafts followed by one token of the target's.

    Args:
        batch: the requests.
        method: "standard" tests token by token (Leviathan et al. 2023), "block" tests prefixes jointly
            (Sun et al. 2024); both keep the distribution.
    """
    widths = batch.widths
    acceptance = block_acceptance(batch) if method == "block" else token_acceptance(batch)
    most = max(widths, default=0)
    uniforms = keyed_uniform(batch.seeds, batch.anchor_positions, Stream.ACCEPT, most).to(torch.float64).tolist()
    count = longest_prefix if method == "block" else first_failure
    accepted = [count(u, c) for u, c in zip(uniforms, acceptance.chances, strict=True)]
    weights = [w[n] for w, n in zip(acceptance.weights, accepted, strict=True)]
    last = last_distributions(batch, accepted, weights)
    noise = gumbel_noise(batch.seeds, batch.anchor_positions, last.shape[1], streams=Stream.RESIDUAL)
    bonus = (last.log() + noise).argmax(-1).tolist()
    return [[*ids[:n], int(token)] for ids, n, token in zip(batch.draft_ids, accepted, bonus, strict=True)]


def first_failure(uniforms: Sequence[float], chances: Sequence[float]) -> int:
    """Drafts before the first one whose uniform is not below its chance."""
    return next((k for k, chance in enumerate(chances) if uniforms[k] >= chance), len(chances))


def longest_prefix(uniforms: Sequence[float], chances: Sequence[float]) -> int:
    """The last k whose uniform is below its chance, whatever happened to shorter prefixes."""
    return max((k + 1 for k, chance in enumerate(chances) if uniforms[k] < chance), default=0)


def token_acceptance(batch: RatioBatch) -> Acceptance:
    """Chance of each draft once those before it are accepted: min(1, target / draft)."""
    chances = [[min(1.0, ratio) for ratio in ratios] for ratios in _ratios(batch)]
    return Acceptance(chances, [[1.0] * (width + 1) for width in batch.widths])


def block_acceptance(batch: RatioBatch) -> Acceptance:
    """Chance h_k of each prefix (Sun et al. 2024, Alg. 2).

    With w_k = min(1, w_{k-1} * target / draft at draft k): h_v = w_v, and for k < v
    h_k = e_k / (e_k + 1 - w_k), where e_k sums max(w_k * target - draft, 0) over the token after draft k.
    """
    weights = []
    for ratios in _ratios(batch):
        prefix = [1.0]
        for ratio in ratios:
            prefix.append(min(1.0, prefix[-1] * ratio))
        weights.append(prefix)
    excess = iter(_inner_excess(batch, weights))
    chances = []
    for prefix in weights:
        inner = [_share(next(excess), 1.0 - weight) for weight in prefix[1:-1]]
        chances.append([*inner, *prefix[1:][-1:]])
    return Acceptance(chances, weights)


def residual(target: Tensor, draft: Tensor, weights: Tensor) -> Tensor:
    """max(weight * target - draft, 0) of each row, not normalised; the target where rounding leaves nothing.

    Args:
        target, draft: [R, V] float64.
        weights: [R] float64.
    """
    excess = (weights[:, None] * target - draft).clamp_(min=0.0)
    return torch.where(excess.amax(-1, keepdim=True) > 0, excess, target)


def last_distributions(batch: RatioBatch, accepted: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Distribution of the token after each accepted prefix, up to a factor: [R, V].

    The residual after a rejection; the target itself after the last draft.
    """
    device = batch.target.device
    target_rows, rejected, draft_rows = [], [], []
    for request, ((start, width), count) in enumerate(zip(_draft_starts(batch), accepted, strict=True)):
        # Before request r, target rows number r more than draft rows: one bonus row a request.
        target_rows.append(start + request + count)
        if count < width:
            rejected.append(request)
            draft_rows.append(start + count)
    last = batch.target[torch.tensor(target_rows, dtype=torch.int64, device=device)]
    if not rejected:
        return last
    index = torch.tensor(rejected, dtype=torch.int64, device=device)
    draft = batch.draft[torch.tensor(draft_rows, dtype=torch.int64, device=device)]
    weight = torch.tensor([weights[r] for r in rejected], dtype=torch.float64, device=device)
    return last.index_copy(0, index, residual(last[index], draft, weight))


def one_hot(draft_ids: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Distributions of drafts that were not drawn: [v, V] float64."""
    index = torch.tensor(list(draft_ids), dtype=torch.int64, device=device)
    rows = torch.zeros(len(draft_ids), vocab_size, dtype=torch.float64, device=device)
    return rows.scatter_(1, index[:, None], 1.0)


def _ratios(batch: RatioBatch) -> list[list[float]]:
    """target / draft at each draft; 0 where the draft could not have been drawn."""
    flat = [token for ids in batch.draft_ids for token in ids]
    ids = torch.tensor(flat, dtype=torch.int64, device=batch.target.device)[:, None]
    rows = [start + r + k for r, (start, width) in enumerate(_draft_starts(batch)) for k in range(width)]
    index = torch.tensor(rows, dtype=torch.int64, device=batch.target.device)
    over = batch.target[index].gather(1, ids)[:, 0].tolist()
    under = batch.draft.gather(1, ids)[:, 0].tolist()
    ratios = [a / b if b > 0 else 0.0 for a, b in zip(over, under, strict=True)]
    return [ratios[start : start + width] for start, width in _draft_starts(batch)]


def _draft_starts(batch: RatioBatch) -> list[tuple[int, int]]:
    """(first draft row, width) of each request."""
    starts, total = [], 0
    for width in batch.widths:
        starts.append((total, width))
        total += width
    return starts


def _inner_excess(batch: RatioBatch, weights: Sequence[Sequence[float]]) -> list[float]:
    """e_k for k = 1..v-1 of each request, requests one after the other."""
    device = batch.target.device
    rows, drafts, factors = [], [], []
    for request, (start, width) in enumerate(_draft_starts(batch)):
        for k in range(1, width):
            rows.append(start + request + k)
            drafts.append(start + k)
            factors.append(weights[request][k])
    target = batch.target[torch.tensor(rows, dtype=torch.int64, device=device)]
    draft = batch.draft[torch.tensor(drafts, dtype=torch.int64, device=device)]
    factor = torch.tensor(factors, dtype=torch.float64, device=device)[:, None]
    excess = (factor * target - draft).clamp_(min=0.0)
    # Integers, so that the sum does not depend on its order or on the rows beside it.
    totals = (excess * _SUM_UNIT).round_().to(torch.int64).sum(-1).tolist()
    return [total / _SUM_UNIT for total in totals]


def _share(part: float, rest: float) -> float:
    """part / (part + rest); 1 where both are 0, as for equal distributions."""
    return part / (part + rest) if part + rest > 0 else 1.0
