"""The verdict on a round: which drafts stand, and the one token that the target adds.

The rows of a request in the verify pass are [anchor, draft_1 .. draft_v]; row i predicts the token after draft i. Stop
tokens and length limits are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dspark.config.errors import ConfigError
from dspark.ops.noise import seeds_tensor
from dspark.ops.opset import ops_for
from dspark.sampling import RequestSampling, draw, filtered_probabilities, is_plain_greedy, uses_ratio_test
from dspark.sampling.constraint import stack_masks
from dspark.speculative.proposer import RequestId
from dspark.speculative.rejection import RatioBatch, decide_by_ratio, one_hot

RejectionMethod = Literal["standard", "block"]


@dataclass(frozen=True, slots=True)
class VerifySpan:
    """One request of a verify pass.

    Attributes:
        request_id: key.
        sampling: parameters and final tokens, anchor last.
        draft_ids: the verify_len drafts that were sent; empty for plain decoding and for the end of prefill.
        draft_probabilities: [>= verify_len, V] float64, what the drafts were drawn from; None when they were an argmax
            or given (one-hot). Read by the ratio test only.
    """

    request_id: RequestId
    sampling: RequestSampling
    draft_ids: Sequence[int] = ()
    draft_probabilities: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of logits that belong to the span: 1 + verify_len."""
        return 1 + len(self.draft_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round emits, per span.

    Attributes:
        request_ids: the keys, in the order of the spans.
        token_ids: for each span the accepted drafts and then exactly one bonus.
        num_accepted: accepted drafts, bonus not counted.
        row_starts: first row of each span; token i of a span came from row `row_starts + i`, which is the row
            whose log-probabilities belong to it.
    """

    request_ids: tuple[RequestId, ...]
    token_ids: list[list[int]]
    num_accepted: list[int]
    row_starts: list[int]


def verify(
    logits: Tensor,
    spans: Sequence[VerifySpan],
    *,
    num_valid_tokens: int | None = None,
    mask: Tensor | None = None,
    rejection_sample_method: RejectionMethod = "standard",
) -> Verdict:
    """Judge the drafts of every span by its own sampler.

    Args:
        logits: [T, V] target rows, spans one after the other.
        spans: requests of the pass; their rows add up to T.
        num_valid_tokens: real vocabulary size.
        mask: [T, V] bool, True where a token is allowed.
        rejection_sample_method: form of the ratio test, token by token or by block; keyed requests do not read it.
    Raises:
        ConfigError: the row counts disagree, or the method is unknown.
    """
    if rejection_sample_method not in ("standard", "block"):
        raise ConfigError(
            f'rejection_sample_method must be "standard" or "block" here, not {rejection_sample_method!r}'
        )
    starts = row_starts(spans, logits.shape[0])
    by_ratio = [uses_ratio_test(span.sampling.params) for span in spans]
    token_ids: list[list[int]] = [[] for _ in spans]
    for is_ratio in (False, True):
        chosen = [i for i, ratio in enumerate(by_ratio) if ratio == is_ratio]
        if not chosen:
            continue
        part = [spans[i] for i in chosen]
        rows, part_mask = logits, mask
        if len(part) < len(spans):
            index = torch.tensor(
                [starts[i] + row for i in chosen for row in range(spans[i].num_rows)], device=logits.device
            )
            rows, part_mask = logits[index], None if mask is None else mask[index]
        if is_ratio:
            emitted = _ratio_tokens(rows, part, num_valid_tokens, part_mask, rejection_sample_method)
        else:
            emitted = _keyed_tokens(rows, part, num_valid_tokens, part_mask)
        for i, tokens in zip(chosen, emitted, strict=True):
            token_ids[i] = tokens
    return make_verdict(spans, token_ids, starts)


def constraint_mask(
    spans: Sequence[VerifySpan], num_valid_tokens: int, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Tokens that may be drawn from each row of a verify pass: [T, V] bool, or None where no request is constrained.

    A draft that may not come ends what can be accepted: it is rejected by the row before it, so the rows after it are
    never read and need no mask.
    """
    rows: list[Tensor | None] = []
    for span in spans:
        constraint, drafts = span.sampling.constraint, span.draft_ids
        rows += [constraint.allowed(drafts[:k]) if constraint is not None else None for k in range(span.num_rows)]
    return stack_masks(rows, num_valid_tokens, device)


def row_starts(spans: Sequence[VerifySpan], num_rows: int) -> list[int]:
    """First row of each span; widths 2, 0, 1 give [0, 3, 4] and need 6 rows."""
    starts, total = [], 0
    for span in spans:
        starts.append(total)
        total += span.num_rows
    if total != num_rows:
        raise ConfigError(f"the verify pass has {num_rows} rows of logits, but its requests need {total}")
    return starts


def make_verdict(spans: Sequence[VerifySpan], token_ids: list[list[int]], starts: list[int]) -> Verdict:
    """Assemble a verdict from emitted tokens."""
    return Verdict(
        request_ids=tuple(span.request_id for span in spans),
        token_ids=token_ids,
        num_accepted=[len(tokens) - 1 for tokens in token_ids],
        row_starts=starts,
    )


def draw_target_tokens(
    logits: Tensor, spans: Sequence[VerifySpan], num_valid_tokens: int | None, mask: Tensor | None
) -> list[int]:
    """The target's own token at every row, drafts before the row counted as its history."""
    if mask is None and all(is_plain_greedy(span.sampling.params) for span in spans):
        tokens = ops_for(logits.device).best_tokens(logits[:, :num_valid_tokens])
    else:
        rows = [row for span in spans for row in span.sampling.rows(span.draft_ids)]
        tokens = draw(logits, rows, num_valid_tokens=num_valid_tokens, mask=mask)
    return [int(token) for token in tokens.tolist()]


def _keyed_tokens(
    logits: Tensor, spans: Sequence[VerifySpan], num_valid_tokens: int | None, mask: Tensor | None
) -> list[list[int]]:
    """Accept while a draft equals the target's own token; the first token that differs is the bonus.

    Row i is only read when drafts 1..i were all accepted, so its history is then exactly that of plain decoding.
    """
    target_ids = draw_target_tokens(logits, spans, num_valid_tokens, mask)
    token_ids = []
    for span, start in zip(spans, row_starts(spans, logits.shape[0]), strict=True):
        accepted = 0
        while accepted < len(span.draft_ids) and span.draft_ids[accepted] == target_ids[start + accepted]:
            accepted += 1
        token_ids.append(target_ids[start : start + accepted + 1])
    return token_ids


def _ratio_tokens(
    logits: Tensor,
    spans: Sequence[VerifySpan],
    num_valid_tokens: int | None,
    mask: Tensor | None,
    method: RejectionMethod,
) -> list[list[int]]:
    """Turn logits into filtered distributions and hand each request to the ratio test."""
    rows = [row for span in spans for row in span.sampling.rows(span.draft_ids)]
    target = filtered_probabilities(logits, rows, num_valid_tokens=num_valid_tokens, mask=mask)
    device, vocab_size = target.device, target.shape[1]
    drafts = [
        one_hot(span.draft_ids, vocab_size, device)
        if span.draft_probabilities is None
        else span.draft_probabilities[: len(span.draft_ids)]
        for span in spans
    ]
    batch = RatioBatch(
        target=target,
        draft=torch.cat(drafts),
        draft_ids=[span.draft_ids for span in spans],
        seeds=seeds_tensor((span.sampling.params.seed for span in spans), device),
        anchor_positions=torch.tensor([span.sampling.anchor_position for span in spans], device=device),
    )
    return decide_by_ratio(batch, method)
