"""From tokens to text, token by token: incomplete characters and possible stop strings are held back."""

from collections.abc import Callable, Sequence

from dspark.engine.stops import StopString

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens that may wait for the rest of a character. It has four bytes at most, so more of them are no character.
_MAX_WAITING = 16


class TextStream:
    """Text of one request's output.

    Text is a function of the tokens alone, so it does not depend on how many tokens arrive at once. A token costs the
    same however long the output is, and whatever it holds.

    Args:
        decode: token ids to text.
        stop: strings that end the output; they are not part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = [StopString(text) for text in dict.fromkeys(stop)]
        self._ids: list[int] = []
        self._context = 0  # first id that is decoded again, so that the joint is decoded in context
        self._settled = 0  # ids whose text is known
        self._text = ""  # known and not handed out
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Take one token; True when a stop string is now complete."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._settled])
        joined = self._decode(self._ids[self._context :])
        if len(joined) <= len(before) or joined.endswith(_REPLACEMENT):
            return self._settle_broken(before, joined)
        self._context, self._settled = self._settled, len(self._ids)
        return self._add(joined[len(before) :])

    def take(self, is_final: bool = False) -> str:
        """Text that is certain by now and was not handed out before; everything when the output has ended."""
        if is_final and not self.stopped:
            before = self._decode(self._ids[self._context : self._settled])
            rest = self._decode(self._ids[self._context :])[len(before) :]
            self._context = self._settled = len(self._ids)
            self._add(rest)
        is_open = not is_final and not self.stopped
        end = len(self._text) - (max((stop.matched for stop in self._stops), default=0) if is_open else 0)
        fresh, self._text = self._text[:end], self._text[end:]
        return fresh

    def _settle_broken(self, before: str, joined: str) -> bool:
        """Bytes that become no character, and tokens without text, must not wait for ever: cut where nothing joins."""
        last = len(self._ids)
        if (last - self._settled) % _MAX_WAITING:
            return False
        for cut in range(last - 1, last - 5, -1):
            front, back = self._decode(self._ids[self._context : cut]), self._decode(self._ids[cut:])
            if front + back == joined and (back or not front.endswith(_REPLACEMENT)):
                self._context = self._settled = cut
                return self._add(front[len(before) :])
        return False

    def _add(self, piece: str) -> bool:
        """Add text, up to the first stop string in it."""
        known = len(self._text)
        self._text += piece
        starts = [known + end - len(stop.text) for stop in self._stops if (end := stop.find(piece)) is not None]
        if starts:
            self._text = self._text[: min(starts)]
            self.stopped = True
        return self.stopped
