"""What a drafter is to the engine: requests in, proposed tokens out, everything keyed by request id."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.sampling import RequestSampling

RequestId = Hashable


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One request that wants a draft block.

    Attributes:
        request_id: key of the drafter's state for this request.
        sampling: parameters and final tokens, anchor last.
    """

    request_id: RequestId
    sampling: RequestSampling

    @property
    def anchor_id(self) -> int:
        """First input of the draft block."""
        return self.sampling.anchor_id

    @property
    def anchor_position(self) -> int:
        """Absolute position of the anchor; draft position k is at anchor_position + k."""
        return self.sampling.anchor_position


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft blocks of R requests, in the order in which they were asked for.

    Attributes:
        request_ids: the R keys.
        token_ids: [R, G] int64.
        confidence_logits: [R, G] float32 before the sigmoid, or None from a drafter without a confidence head.
        draft_probabilities: [R, G, V] float64, the filtered distributions that the drafts were drawn from; None
            when no request uses the ratio test, or when every draft was an argmax (one-hot).
    """

    request_ids: tuple[RequestId, ...]
    token_ids: Tensor
    confidence_logits: Tensor | None = None
    draft_probabilities: Tensor | None = None

    @property
    def width(self) -> int:
        """G, the number of drafts for each request."""
        return self.token_ids.shape[1]


class Proposer(Protocol):
    """A drafter. It may keep state keyed by request id; committed target rows reach it outside of this protocol."""

    @property
    def num_speculative_tokens(self) -> int:
        """Largest G that `propose` returns; 0 means that it never drafts."""
        ...

    def propose(self, requests: Sequence[ProposalRequest]) -> Proposal:
        """Draft one block for each request."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept for a request that ended or was preempted; unknown ids are fine."""
        ...


class NoProposer:
    """Drafts nothing: every round is a plain decode step."""

    num_speculative_tokens = 0

    def propose(self, requests: Sequence[ProposalRequest]) -> Proposal:
        """Return blocks of width 0."""
        empty = torch.empty(len(requests), 0, dtype=torch.int64)
        return Proposal(tuple(request.request_id for request in requests), empty)

    def forget(self, request_id: RequestId) -> None:
        """Nothing is kept."""


class ContinuationProposer:
    """Proposes given tokens by absolute position, right or wrong as asked; it can force any accept pattern.

    Args:
        tokens: for each request its whole text, prompt included, so that entry i is the token at position i.
        num_speculative_tokens: G.
        vocab_size: V; a wrong draft is the right one plus 1, modulo V.
        num_right: (request id, anchor position) -> how many leading drafts are right; None leaves all as given.
        confidence_logit: reported for every draft, or None.
    """

    def __init__(
        self,
        tokens: Mapping[RequestId, Sequence[int]],
        num_speculative_tokens: int,
        vocab_size: int,
        *,
        num_right: Callable[[RequestId, int], int] | None = None,
        confidence_logit: float | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._num_right = num_right
        self._confidence_logit = confidence_logit

    def propose(self, requests: Sequence[ProposalRequest]) -> Proposal:
        """Read the next G tokens of each text; past its end, token 0 is proposed."""
        blocks = [self._block(request) for request in requests]
        token_ids = torch.tensor(blocks, dtype=torch.int64).view(len(requests), self.num_speculative_tokens)
        confidence = None
        if self._confidence_logit is not None:
            confidence = torch.full(token_ids.shape, self._confidence_logit, dtype=torch.float32)
        return Proposal(tuple(request.request_id for request in requests), token_ids, confidence)

    def forget(self, request_id: RequestId) -> None:
        """The texts belong to the caller."""

    def _block(self, request: ProposalRequest) -> list[int]:
        """The given tokens after the anchor, made wrong from draft position num_right + 1 on."""
        width, start = self.num_speculative_tokens, request.anchor_position + 1
        block = list(self._tokens[request.request_id][start : start + width])
        block += [0] * (width - len(block))
        right = width
        if self._num_right is not None:
            right = self._num_right(request.request_id, request.anchor_position)
        return [token if k < right else (token + 1) % self._vocab_size for k, token in enumerate(block)]
