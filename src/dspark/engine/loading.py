"""What an engine says while it reads its weights, which may take minutes."""

import time
from collections.abc import Callable

PERIOD_S = 10.0


class LoadingNews:
    """Says how far the reading is, from time to time.

    Args:
        say: told a sentence.
        period_s: seconds between two sentences, and before the first.
    """

    def __init__(self, say: Callable[[str], None], period_s: float = PERIOD_S) -> None:
        self._say = say
        self._period_s = period_s
        self._due = time.monotonic() + period_s

    def __call__(self, done: int, total: int) -> None:
        """See `dspark.checkpoint.counted.OnRead`."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._period_s
            self._say(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB of weights are read")
