"""Semi-autoregressive drafting: one parallel pass for the block, then a light left-to-right loop (DSpark sec. 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.config.errors import ConfigError
from dspark.sampling import (
    ConstraintWalk,
    RowSampling,
    SamplingBatch,
    Stream,
    draw,
    filtered_probabilities,
    uses_ratio_test,
)
from dspark.speculative.proposer import Proposal, ProposalRequest, RequestId


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Result of the parallel pass over [anchor, noise x (G-1)] of R requests.

    Attributes:
        base_logits: [R, G, V], U_k of eq. 4; entry k-1 predicts the token at anchor + k.
        hidden: [R, G, D], h_k, which the confidence head reads.
    """

    base_logits: Tensor
    hidden: Tensor


class DraftModel(Protocol):
    """The drafter's networks and its state per request."""

    def draft_block(self, requests: Sequence[ProposalRequest]) -> DraftBlock:
        """Run the parallel pass for R requests; may return more positions than are used."""
        ...

    def markov_bias(self, prev_ids: Tensor) -> Tensor | None:
        """B_k of eq. 5 from the previous token ids [R]: [R, V]; None without a sequential head."""
        ...

    def confidence_logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
        """Logit of c_k (eq. 7) from h_k [R, D] and the previous ids [R]: [R]; None without a confidence head."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop the state of a request."""
        ...


class DSparkProposer:
    """Draws a block left to right: token k from softmax(U_k + B_k(x_{k-1})), with the request's own filters.

    Under the keyed sampler a draft is drawn with the noise that the target will use at the same position, which makes
    the two agree as often as their distributions allow. Under the ratio test it has noise of its own, because the
    test needs a draft that is independent of everything that decides its acceptance.

    Args:
        model: networks and state.
        num_speculative_tokens: G, at most the model's block.
        num_valid_tokens: real vocabulary size; padding ids are never proposed.
    """

    def __init__(self, model: DraftModel, num_speculative_tokens: int, num_valid_tokens: int | None = None) -> None:
        if num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens must be at least 1 for the DSpark drafter, not {num_speculative_tokens}; "
                "turn speculation off instead"
            )
        self.num_speculative_tokens = num_speculative_tokens
        self._model = model
        self._num_valid_tokens = num_valid_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> Proposal:
        """Draft G tokens for each request, with confidences, and with probabilities if a request needs them."""
        block = self._model.draft_block(requests)
        logits, hidden = block.base_logits, block.hidden
        if logits.shape[1] < self.num_speculative_tokens:
            raise ConfigError(
                f"the draft block has {logits.shape[1]} positions, fewer than num_speculative_tokens = "
                f"{self.num_speculative_tokens}; lower num_speculative_tokens"
            )
        vocab_size = self._num_valid_tokens or logits.shape[2]
        batch = SamplingBatch.build([_draft_row(request) for request in requests], vocab_size, logits.device)
        wants_probabilities = any(uses_ratio_test(request.sampling.params) for request in requests)
        walk = ConstraintWalk([request.sampling.constraint for request in requests], vocab_size, logits.device)
        prev = torch.tensor([request.anchor_id for request in requests], dtype=torch.int64, device=logits.device)
        tokens, confidences, probabilities = [], [], []
        for k in range(self.num_speculative_tokens):
            confidences.append(self._model.confidence_logits(hidden[:, k], prev))
            corrected = _add_bias(logits[:, k], self._model.markov_bias(prev))
            mask = walk.mask()
            if wants_probabilities:
                found = filtered_probabilities(corrected, batch, num_valid_tokens=vocab_size, mask=mask)
                probabilities.append(found)
            prev = draw(corrected, batch, num_valid_tokens=vocab_size, mask=mask)
            batch = batch.advance(prev)
            walk.advance(prev)
            tokens.append(prev)
        return Proposal(
            request_ids=tuple(request.request_id for request in requests),
            token_ids=torch.stack(tokens, dim=1),
            confidence_logits=_stack(confidences),
            draft_probabilities=_stack(probabilities),
        )

    def forget(self, request_id: RequestId) -> None:
        """Drop the model's state of a request."""
        self._model.forget(request_id)


def _draft_row(request: ProposalRequest) -> RowSampling:
    """Context of draft position 1."""
    ratio = uses_ratio_test(request.sampling.params)
    return request.sampling.row(stream=Stream.DRAFT if ratio else Stream.TARGET)


def _add_bias(base_logits: Tensor, bias: Tensor | None) -> Tensor:
    """Base logits plus the sequential head's bias, in float32."""
    return base_logits.float() if bias is None else base_logits.float() + bias.float()


def _stack(columns: Sequence[Tensor | None]) -> Tensor | None:
    """Stack columns over the draft positions; None if any is missing."""
    present = [column for column in columns if column is not None]
    return torch.stack(present, dim=1) if present and len(present) == len(columns) else None
