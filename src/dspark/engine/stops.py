"""Stop strings: found while a text grows, in a time that depends on the text and not on how long the strings are."""


class StopString:
    """How much of a stop string the end of a growing text spells (the automaton of Knuth, Morris and Pratt).

    The table of borders grows with the longest match, so a long string that never comes near costs nothing.

    Args:
        text: the stop string, not empty.
    Attributes:
        matched: characters of the longest beginning of the stop string that the text ends with.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # Entry i: characters of the longest beginning of text[: i + 1] that it also ends with, itself apart.
        self._borders = [0]

    def find(self, piece: str) -> int | None:
        """Add to the text.

        Returns:
            characters of the piece up to the end of the first whole stop string, or None.
        """
        place = 0
        while place < len(piece):
            if not self.matched:
                place = piece.find(self.text[0], place)
                if place < 0:
                    return None
            self._step(piece[place])
            place += 1
            if self.matched == len(self.text):
                return place
        return None

    def _step(self, character: str) -> None:
        """Add one character."""
        self.matched = self._longer(self.matched, character)
        if self.matched > len(self._borders):
            self._borders.append(self._longer(self._borders[-1], character))

    def _longer(self, size: int, character: str) -> int:
        """The longest match after a character that follows a match of some size."""
        while size and self.text[size] != character:
            size = self._borders[size - 1]
        return size + (self.text[size] == character)
