"""What may come next in one request's output, as a promise that somebody else keeps: the masks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class TokenConstraint(Protocol):
    """The tokens that may follow an output. A function of the tokens taken so far and of nothing else."""

    def allowed(self, ahead: Sequence[int] = ()) -> Tensor | None:
        """Tokens that may come after the output and some tentative tokens.

        Args:
            ahead: tokens that may or may not be taken later.
        Returns:
            [V] bool on the CPU, without padding ids, at least one of them True; None where `ahead` may not come itself.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Take a token; False where it may not come, which leaves this constraint unusable."""
        ...


class ConstraintWalk:
    """Masks of R requests along their drafts.

    Args:
        constraints: of the R requests, None for those that may say anything.
        num_valid_tokens: V without padding.
        device: where masks are wanted.
    """

    def __init__(
        self, constraints: Sequence[TokenConstraint | None], num_valid_tokens: int, device: torch.device
    ) -> None:
        self._constraints = constraints
        self._drafts: list[list[int]] = [[] for _ in constraints]
        self._is_needed = any(constraint is not None for constraint in constraints)
        self._num_valid_tokens = num_valid_tokens
        self._device = device

    def mask(self) -> Tensor | None:
        """Tokens that may come next in each request: [R, V] bool, or None where all may in every request."""
        rows = [
            constraint.allowed(drafts) if constraint is not None else None
            for constraint, drafts in zip(self._constraints, self._drafts, strict=True)
        ]
        return stack_masks(rows, self._num_valid_tokens, self._device)

    def advance(self, token_ids: Tensor) -> None:
        """Go one draft further: [R]. Waits for a device only where something is constrained."""
        if self._is_needed:
            for drafts, token in zip(self._drafts, token_ids.tolist(), strict=True):
                drafts.append(token)


def stack_masks(
    rows: Sequence[Tensor | None], num_valid_tokens: int, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Masks of T rows: [T, V] bool; None stands for all tokens, in a row or for the whole."""
    chosen = [(number, row) for number, row in enumerate(rows) if row is not None]
    if not chosen:
        return None
    mask = torch.ones(len(rows), num_valid_tokens, dtype=torch.bool, device=device)
    index = torch.tensor([number for number, _ in chosen], device=device)
    mask[index] = torch.stack([row for _, row in chosen]).to(device)
    return mask
