"""Signs of life between rank 0 and its followers: what is said, and what a rank says of its own work."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PING, STOP = "ping", "stop"
PONG, SAID, FAILED = "pong", "said", "failed"


@dataclass(frozen=True)
class Work:
    """What a rank is doing.

    Attributes:
        number: of the piece of work, counted from 1; every rank counts the same ones.
        name: of the call; empty between calls.
        seconds: since it began.
        limit_s: that it may take.
    """

    number: int = 0
    name: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether it should have ended."""
        return bool(self.name) and self.seconds > self.limit_s


@dataclass(frozen=True)
class Failure:
    """What a rank says of its end: a sentence, and for those who look into the code the place."""

    sentence: str
    place: str


class Progress:
    """The work of one thread, to be looked at from another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work = Work()
        self._began = 0.0

    def begin(self, name: str, limit_s: float) -> None:
        """A piece of work begins, and the one before it has ended."""
        with self._lock:
            self._work = Work(self._work.number + 1, name, 0.0, limit_s)
            self._began = time.monotonic()

    def end(self) -> None:
        """Nothing is being done."""
        with self._lock:
            self._work = Work(self._work.number)

    @contextmanager
    def working(self, name: str, limit_s: float) -> Iterator[None]:
        """A piece of work inside."""
        self.begin(name, limit_s)
        yield
        self.end()

    def seen(self) -> Work:
        """The work of this moment."""
        with self._lock:
            work = self._work
            return Work(work.number, work.name, time.monotonic() - self._began, work.limit_s)

    def forgive(self, seconds: float) -> None:
        """Time in which the process itself stood still does not count."""
        with self._lock:
            self._began += seconds
