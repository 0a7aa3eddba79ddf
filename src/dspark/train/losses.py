"""Training losses over rows, computed in chunks so that [rows, V] float logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dspark.train.protocols import DraftHeads

#: Rows whose logits are alive together: 8192 x 4096 x 4 bytes are 128 MiB.
CHUNK_ROWS = 8192


def target_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
    z_weight: float = 0.0,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of next-token rows, plus z_weight * mean(logsumexp^2).

    Args:
        hidden: [N, D] head rows.
        labels: [N] int64 token ids to predict.
        logits: maps head rows to [n, V].
        z_weight: 0 leaves the logits' scale free.
        chunk_rows: rows a chunk; the value does not depend on it beyond rounding.

    Returns:
        The loss to minimise and the cross entropy alone (detached), in nats a token.
    """

    def chunk(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        scores = logits(rows)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        log_norm = scores.logsumexp(-1)
        picked = scores.gather(-1, ids[:, None]).squeeze(-1)
        return torch.stack(((log_norm - picked).sum(), log_norm.square().sum()))

    parts = [
        checkpoint(chunk, hidden[rows], labels[rows], use_reentrant=False) for rows in _chunks(len(labels), chunk_rows)
    ]
    entropy, square = torch.stack(parts).sum(0) / len(labels)
    return entropy + z_weight * square, entropy.detach()


@dataclass(frozen=True)
class DraftLossWeights:
    """DSpark sec. 3.3: L = ce * CE + l1 * ||p_draft - p_target||_1 + confidence * BCE.

    decay_len is the G of the position weights exp(-(k - 1) / G).
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay_len: float | None = None


@dataclass(frozen=True)
class DraftLoss:
    """Sums over the blocks of one call.

    Attributes:
        loss: scalar to minimise.
        ce, l1, bce: weighted means, detached.
        overlap: [G] mean 1 - TV of each draft position: the chance that the ratio test accepts it.
        agree: [G] share of rows in which draft and target have the same argmax.
        confidence: [G] mean predicted confidence.
        rows: [G] valid rows of each position.
        accepted_len: [2] mean accepted length over the blocks, bonus counted, if every drafted token were the
            text's own: under the ratio test, and where draft and target agree on the most likely token.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    bce: torch.Tensor
    overlap: torch.Tensor
    agree: torch.Tensor
    confidence: torch.Tensor
    rows: torch.Tensor
    accepted_len: torch.Tensor


def position_weights(block_size: int, decay_len: float | None = None) -> torch.Tensor:
    """Return exp(-(k - 1) / decay_len) for k = 1..block_size; decay_len defaults to the block size."""
    k = torch.arange(block_size, dtype=torch.float64)
    return torch.exp(-k / (decay_len or block_size))


def dspark_loss(
    heads: DraftHeads,
    target_logits: Callable[[torch.Tensor], torch.Tensor],
    head_hidden: torch.Tensor,
    confidence_hidden: torch.Tensor,
    target_rows: torch.Tensor,
    prev_ids: torch.Tensor,
    labels: torch.Tensor,
    valid: torch.Tensor,
    weights: DraftLossWeights | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> DraftLoss:
    """The DSpark training loss over N blocks of G draft positions.

    The label of the confidence, c* = 1 - 0.5 ||p_draft - p_target||_1 (eq. 8), carries no gradient; the
    target's distribution is recomputed from its rows in each chunk and carries none either.

    Args:
        heads: drafter heads; see `DraftHeads`.
        target_logits: maps target rows [n, D] to [n, V].
        head_hidden, confidence_hidden: [N, G, D].
        target_rows: [N, G, D] target head rows which predict the same tokens.
        prev_ids: [N, G] token before the one each row predicts (the anchor for k = 1).
        labels: [N, G] the text's own next tokens.
        valid: [N, G] bool; rows beyond the text's end count for nothing.
        weights: see `DraftLossWeights`.
        chunk_rows: rows a chunk.
    """
    weights = weights or DraftLossWeights()
    num_blocks, block_size = labels.shape
    total = num_blocks * block_size
    chunk = _draft_chunk(heads, target_logits)
    rows = [t.reshape(total, -1) for t in (head_hidden, confidence_hidden, target_rows)]
    ids = [t.reshape(total) for t in (prev_ids, labels)]
    parts = [
        checkpoint(chunk, *(t[part] for t in rows), *(t[part] for t in ids), use_reentrant=False)
        for part in _chunks(total, chunk_rows)
    ]
    ce, l1, bce, agree, confidence = (
        torch.cat(column).view(num_blocks, block_size) for column in zip(*parts, strict=True)
    )
    decay = position_weights(block_size, weights.decay_len).to(ce)
    row_weights = valid.to(ce) * decay
    norm = row_weights.sum().clamp_min(1e-9)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (values * row_weights).sum() / norm

    def per_position(values: torch.Tensor) -> torch.Tensor:
        return (values.detach() * valid.to(ce)).sum(0) / valid.sum(0).clamp_min(1)

    ce_mean, l1_mean, bce_mean = mean(ce), mean(l1), mean(bce)
    passed = torch.stack((1 - 0.5 * l1.detach(), agree)) * valid.to(ce)
    return DraftLoss(
        loss=weights.ce * ce_mean + weights.l1 * l1_mean + weights.confidence * bce_mean,
        ce=ce_mean.detach(),
        l1=l1_mean.detach(),
        bce=bce_mean.detach(),
        overlap=per_position(1 - 0.5 * l1),
        agree=per_position(agree),
        confidence=per_position(confidence),
        rows=valid.sum(0),
        accepted_len=1 + passed.cumprod(-1).sum(-1).mean(-1),
    )


def _draft_chunk(
    heads: DraftHeads, target_logits: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the function that gives CE, L1, BCE, agreement and confidence of each row of a chunk."""

    def chunk(
        head_hidden: torch.Tensor,
        confidence_hidden: torch.Tensor,
        target_rows: torch.Tensor,
        prev_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        draft_scores = heads.draft_logits(head_hidden, prev_ids)
        with torch.no_grad():
            target_scores = target_logits(target_rows)
            target_probs = target_scores.softmax(-1)
        log_probs = draft_scores.log_softmax(-1)
        ce = -log_probs.gather(-1, labels[:, None]).squeeze(-1)
        l1 = (log_probs.exp() - target_probs).abs().sum(-1)
        confidence_logits = heads.confidence_logits(confidence_hidden, prev_ids).to(l1)
        survives = (1 - 0.5 * l1).detach().clamp(0, 1)
        bce = F.binary_cross_entropy_with_logits(confidence_logits, survives, reduction="none")
        agree = (draft_scores.detach().argmax(-1) == target_scores.argmax(-1)).to(l1)
        return ce, l1, bce, agree, confidence_logits.detach().sigmoid()

    return chunk


def balanced_bias(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the router's selection bias moved towards even loads, without a loss term.

    An expert with less than the mean load gains rate, one with more loses it (auxiliary-loss-free balancing,
    Wang et al. 2024). The result is centred, because only differences select.

    Args:
        bias: [E] or [layers, E].
        load: rows routed to each expert, same shape.
        rate: step of the bias.
    """
    load = load.to(bias)
    moved = bias + rate * torch.sign(load.mean(-1, keepdim=True) - load)
    return moved - moved.mean(-1, keepdim=True)


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, total)) for at in range(0, total, size))
