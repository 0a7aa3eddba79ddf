"""Tokens as the API shows them: their text, their bytes, and where their text begins in an output."""

from codecs import IncrementalDecoder
from collections.abc import Callable, Sequence
from typing import Any

from dspark.engine.request import TokenLogprob

# JSON has no infinity; this is what other servers of the field send for a token that cannot come.
IMPOSSIBLE = -9999.0


class TokenTexts:
    """Text and bytes of single tokens.

    Args:
        token_bytes: of one token id.
        special_ids: tokens that are left out of texts.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], special_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids

    def text(self, token_id: int) -> str:
        """The token's text; part of a character as "bytes:\\xe4\\xbd", so that no two tokens look the same."""
        octets = self._token_bytes(token_id)
        try:
            return octets.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{octet:02x}" for octet in octets)

    def octets(self, token_id: int) -> list[int]:
        """The token's bytes."""
        return list(self._token_bytes(token_id))

    def shares(self, token_ids: Sequence[int], decoder: IncrementalDecoder) -> list[str]:
        """What each token adds to a text; a character made by several tokens belongs to the one that completes it.

        Args:
            token_ids: the next tokens of an output.
            decoder: of UTF-8, one for each output; it keeps the bytes of an incomplete character.
        """
        return [
            "" if token_id in self._special_ids else decoder.decode(self._token_bytes(token_id))
            for token_id in token_ids
        ]

    def num_characters(self, token_id: int) -> int:
        """Characters that begin in the token; a special token adds none to a text."""
        if token_id in self._special_ids:
            return 0
        return sum(octet & 0xC0 != 0x80 for octet in self._token_bytes(token_id))

    def completion_logprobs(
        self, token_ids: Sequence[int], found: Sequence[TokenLogprob | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """The `logprobs` object of a completion's choice.

        Args:
            token_ids: the tokens.
            found: one per token; None where no row predicts it.
            offset: characters of the text before the first token.
        Returns:
            the object, and the offset after the last token.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += self.num_characters(token_id)
        listed = {
            "tokens": [self.text(token_id) for token_id in token_ids],
            "token_logprobs": [None if one is None else as_number(one.token) for one in found],
            "top_logprobs": [None if one is None else self._alternatives(one) for one in found],
            "text_offset": offsets,
        }
        return listed, offset

    def _alternatives(self, found: TokenLogprob) -> dict[str, float]:
        """Values by text, best first; the token itself is always among them."""
        listed = {self.text(token_id): as_number(value) for token_id, value in found.top}
        listed.setdefault(self.text(found.token_id), as_number(found.token))
        return listed

    def chat_logprobs(self, found: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """The `content` list of a chat choice's `logprobs`."""
        return [
            {
                **self._entry(one.token_id, one.token),
                "top_logprobs": [self._entry(token_id, value) for token_id, value in one.top],
            }
            for one in found
        ]

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": as_number(value), "bytes": self.octets(token_id)}


def as_number(value: float) -> float:
    """A log-probability that JSON can hold."""
    return max(value, IMPOSSIBLE)
