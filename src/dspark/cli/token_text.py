"""Streamed text in two colours: accepted drafts, and the target's own tokens."""

from collections.abc import Callable, Sequence
from typing import IO

from rich.color import ColorSystem
from rich.style import Style

from dspark.cli.console import ACCEPTED_STYLE
from dspark.engine import Emission

Decode = Callable[[Sequence[int]], str]
_ACCEPTED = Style.parse(ACCEPTED_STYLE)
# What a decoder prints for a character whose bytes have not all arrived.
_REPLACEMENT = "\ufffd"


class TokenText:
    """Prints emissions as they come.

    The engine holds text back while a character or a stop string is open, so an emission's text may begin with
    characters of earlier tokens. Their ids are kept until their text has been printed.

    Args:
        file: where to print. Text goes there as it is: a console would expand tabs and wrap lines.
        decode: token ids to text.
        is_colored: without colour the text is printed as it is.
    """

    def __init__(self, file: IO[str], decode: Decode, *, is_colored: bool) -> None:
        self._file = file
        self._decode = decode
        self._is_colored = is_colored
        self._held_ids: list[int] = []
        self._printed = 0

    def show(self, emission: Emission) -> None:
        """Print the text of one step."""
        text = emission.text
        if self._is_colored:
            drafted, own = self._split(emission)
            text = _ACCEPTED.render(drafted, color_system=ColorSystem.STANDARD) + own
        self._file.write(text)
        self._file.flush()

    def _split(self, emission: Emission) -> tuple[str, str]:
        """Cut an emission's text where its accepted drafts end; a character that spans the cut is the target's."""
        drafted_ids = [*self._held_ids, *emission.token_ids[: emission.num_accepted]]
        drafted_text = self._decode(drafted_ids).rstrip(_REPLACEMENT)[self._printed :] if drafted_ids else ""
        cut = _common_len(drafted_text, emission.text) if emission.num_accepted else 0
        self._held_ids += emission.token_ids
        self._printed += len(emission.text)
        if len(self._decode(self._held_ids)) <= self._printed:
            self._held_ids, self._printed = [], 0
        return emission.text[:cut], emission.text[cut:]


def _common_len(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
