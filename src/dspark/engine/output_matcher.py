"""What may come next in one structured output, looked up along its drafts without ever taking a token back.

A lookahead runs on a copy: a matcher of the grammar library that was rolled back allows other tokens afterwards than
one that never went there, and the tokens of a request must not depend on its drafts. The price of a copy grows with the
output, so the masks that drafting has asked for are kept for the verification.

Copies of one matcher share what the library remembers of its grammar, and that has a limit. Whoever meets it goes on
with a matcher of its own, so that no output ends because of what others have said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.config.errors import ConfigError


class Cursor:
    """A matcher of the library at the end of some tokens.

    Args:
        matcher: the library's.
        recompile: makes one that shares nothing, before any token.
        tokens: that the matcher has taken.
    """

    def __init__(self, matcher: Any, recompile: Callable[[], Any], tokens: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._recompile = recompile
        self._tokens = list(tokens)
        self._has_given_up = False

    def copy(self) -> Cursor:
        """One that goes its own way from here."""
        copied = Cursor(self._matcher.deep_copy(), self._recompile, self._tokens)
        copied._has_given_up = self._has_given_up
        return copied

    def advance(self, token_id: int) -> bool:
        """Take a token; False where it may not come, or where the grammar is too complex to tell."""
        self._tokens.append(token_id)
        if self._has_given_up:
            return False
        return bool(self._matcher.consume_token(token_id)) or self._renew()

    def mask(self) -> bytes | None:
        """Tokens that may come next, packed into bits; None where the grammar is too complex to tell."""
        if self._has_given_up:
            return None
        packed: bytes = self._matcher.compute_bitmask()
        if not self._matcher.is_error():
            return packed
        packed = self._matcher.compute_bitmask() if self._renew() else b""
        self._has_given_up = self._has_given_up or self._matcher.is_error()
        return None if self._has_given_up else packed

    def _renew(self) -> bool:
        """Go on with a matcher that nobody else has used; False where that one fails too."""
        try:
            self._matcher = self._recompile()
        except ConfigError:
            self._has_given_up = True
        else:
            self._has_given_up = not self._matcher.consume_tokens(self._tokens)
        return not self._has_given_up


class OutputMatcher:
    """The `TokenConstraint` of one output.

    Args:
        cursor: at the end of the output.
        num_valid_tokens: V without padding.
        eos_token_ids: ids that end an output.
        avoids_eos: the output goes on while it can.
    """

    def __init__(self, cursor: Cursor, num_valid_tokens: int, eos_token_ids: Sequence[int], avoids_eos: bool) -> None:
        self._cursor = cursor
        self._num_valid_tokens = num_valid_tokens
        self._eos_token_ids = list(eos_token_ids)
        self._avoids_eos = avoids_eos
        self._scout: Cursor | None = None  # has gone along _ahead
        self._ahead: list[int] = []
        self._masks: list[bytes | None] = []  # before each token of _ahead and after the last

    def allowed(self, ahead: Sequence[int] = ()) -> Tensor | None:
        """See `TokenConstraint.allowed`; where nothing else is left, the end-of-sequence ids."""
        if not self._masks:
            self._masks.append(self._cursor.mask())
        if self._ahead[: len(ahead)] != list(ahead) and not self._look(ahead):
            return None
        return self._unpacked(self._masks[len(ahead)])

    def _look(self, ahead: Sequence[int]) -> bool:
        """Send the scout along some tokens; False when one of them may not come."""
        known = len(self._ahead)
        if self._scout is None or self._ahead != list(ahead[:known]):
            self._scout, self._ahead, known = self._cursor.copy(), [], 0
            del self._masks[1:]
        for token in ahead[known:]:
            if not self._unpacked(self._masks[-1])[token]:
                return False
            if not self._scout.advance(token):
                self._scout = None
                return False
            self._ahead.append(token)
            self._masks.append(self._scout.mask())
        return True

    def _unpacked(self, packed: bytes | None) -> Tensor:
        """[V] bool of a mask. Where a grammar gave up, the output can only end, and `advance` tells that it broke."""
        allowed = torch.zeros(self._num_valid_tokens, dtype=torch.bool)
        if packed is not None:
            bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=len(allowed), bitorder="little")
            allowed = torch.from_numpy(bits).to(torch.bool)
        if self._avoids_eos:
            others = allowed.clone()
            others[self._eos_token_ids] = False
            allowed = others if others.any() else allowed
        if not allowed.any():
            allowed[self._eos_token_ids] = True
        return allowed

    def advance(self, token_id: int) -> bool:
        """See `TokenConstraint.advance`."""
        self._scout, self._ahead, self._masks = None, [], []
        return self._cursor.advance(token_id)

    def copy(self) -> OutputMatcher:
        """One that goes its own way from here."""
        return OutputMatcher(self._cursor.copy(), self._num_valid_tokens, self._eos_token_ids, self._avoids_eos)
