"""What may come next in one request's output, as a promise that somebody else keeps: the masks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class TokenConstraint(Protocol):
    """The tokens that may follow an output. A function of the tokens taken so far and of nothing else."""

    def allowed(self) -> Tensor:
        """Tokens that may come next: [V] bool on the CPU, without padding ids, at least one of them True."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take a token; False where it may not come, which leaves this constraint unusable."""
        ...

    def copy(self) -> TokenConstraint:
        """One that goes its own way from here."""
        ...


class ConstraintWalk:
    """Constraints of R requests that follow tentative tokens; those of the requests themselves stay where they are.

    Args:
        constraints: of the R requests, None for those that may say anything.
        num_valid_tokens: V without padding.
        device: where masks are wanted.
    """

    def __init__(
        self, constraints: Sequence[TokenConstraint | None], num_valid_tokens: int, device: torch.device
    ) -> None:
        self._walkers = [constraint.copy() if constraint else None for constraint in constraints]
        self._num_valid_tokens = num_valid_tokens
        self._device = device

    @property
    def is_needed(self) -> bool:
        """Whether any request is constrained; without one there are no masks."""
        return any(self._walkers)

    def mask(self) -> Tensor | None:
        """Tokens that may come next in each request: [R, V] bool, or None where all may."""
        if not self.is_needed:
            return None
        mask = torch.ones(len(self._walkers), self._num_valid_tokens, dtype=torch.bool)
        for row, walker in zip(mask, self._walkers, strict=True):
            if walker is not None:
                row.copy_(walker.allowed())
        return mask.to(self._device)

    def advance(self, token_ids: Tensor) -> None:
        """Take one token of each request: [R]. One that could not follow ends what is asked of its request."""
        if not self.is_needed:
            return
        for number, token in enumerate(token_ids.tolist()):
            walker = self._walkers[number]
            if walker is not None and not walker.advance(token):
                self._walkers[number] = None


def fill_allowed_rows(mask: Tensor, constraint: TokenConstraint, draft_ids: Sequence[int]) -> None:
    """Write what may follow a request's final tokens and each of its drafts.

    A draft that may not come ends it: the rows after it are never read, because the row before it rejects the draft.

    Args:
        mask: [1 + verify_len, V] bool, True everywhere.
        constraint: at the request's final tokens; it stays there.
        draft_ids: [verify_len].
    """
    walker = constraint.copy()
    mask[0] = walker.allowed()
    for row, draft in enumerate(draft_ids):
        if not mask[row, draft] or not walker.advance(draft):
            return
        mask[row + 1] = walker.allowed()
