"""From tokens to text, token by token: incomplete characters and possible stop strings are held back."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text of one request's output.

    Text is a function of the tokens alone, so it does not depend on how many tokens arrive at once.

    Args:
        decode: token ids to text.
        stop: strings that end the output; they are not part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # first id that is decoded again, so that the joint is decoded in context
        self._settled = 0  # ids whose text is in _text
        self._text = ""
        self._handed_out = 0
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Take one token; True when a stop string is now complete."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._settled])
        joined = self._decode(self._ids[self._context :])
        if len(joined) <= len(before) or joined.endswith(_REPLACEMENT):
            return False
        self._text += joined[len(before) :]
        self._context, self._settled = self._settled, len(self._ids)
        return self._find_stop()

    def take(self, is_final: bool = False) -> str:
        """Text that is certain by now and was not handed out before; everything when the output has ended."""
        if is_final and not self.stopped:
            before = self._decode(self._ids[self._context : self._settled])
            self._text += self._decode(self._ids[self._context :])[len(before) :]
            self._context = self._settled = len(self._ids)
            self._find_stop()
        end = len(self._text) if is_final or self.stopped else len(self._text) - self._held_back()
        fresh = self._text[self._handed_out : end]
        self._handed_out = max(self._handed_out, end)
        return fresh

    def _find_stop(self) -> bool:
        """Cut the text before the first stop string in it."""
        starts = [self._text.find(text, max(self._handed_out - len(text), 0)) for text in self._stop]
        found = [place for place in starts if place >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True
        return self.stopped

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for text in self._stop:
            for size in range(min(len(text) - 1, len(self._text)), longest, -1):
                if self._text.endswith(text[:size]):
                    longest = size
                    break
        return longest
