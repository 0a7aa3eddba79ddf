"""Rank 0's watch over a team: a thread that notices a rank that has ended, failed, or stands still."""

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from dspark.engine.ranks.beat import FAILED, PING, SAID, Failure, Progress, Work
from dspark.engine.ranks.failure import TimeLimits
from dspark.engine.ranks.link import Link

_LOG = logging.getLogger("dspark.engine")

# What a process that ends may need from the closing of its sockets until that can be seen.
_ENDING_S = 0.2


class Watch:
    """Asks every follower for a sign of life and looks at the clock of every call.

    Args:
        processes, links: of the followers, rank 1 first.
        progress: of rank 0's own calls.
        on_beat: called in the watch's thread while all is well.
        on_failure: called there, once, with the sentence that says what happened.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        links: Sequence[Link],
        progress: Progress,
        limits: TimeLimits,
        on_beat: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._links = links
        self._progress = progress
        self._limits = limits
        self._on_beat = on_beat
        self._on_failure = on_failure
        self._heard = [time.monotonic()] * len(links)
        self._patience_s = [limits.setup_s] * len(links)  # until a process has begun to answer
        self._works = [Work()] * len(links)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-ranks", daemon=True)

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is the watch itself."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._is_over.set()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._is_over.is_set():
            for link in self._links:
                with contextlib.suppress(OSError):  # its process has ended, which the look below sees
                    link.beats.send(PING)
            wait([link.beats for link in self._links], self._limits.beat_s)
            now = time.monotonic()
            if now - looked > 4 * self._limits.beat_s:
                # This process itself stood still, so nobody else is to blame for the silence.
                self._heard = [now] * len(self._links)
                self._progress.forgive(now - looked)
            looked = now
            sentence = self._look(now)
            if self._is_over.is_set():
                return
            if sentence is not None:
                self._on_failure(sentence)
                return
            self._on_beat()
            self._is_over.wait(self._limits.beat_s / 2)

    def _look(self, now: float) -> str | None:
        """What is wrong, or None."""
        failures: dict[int, Failure] = {}
        for number, link in enumerate(self._links):
            try:
                while link.beats.poll():
                    kind, told = link.beats.recv()
                    if kind == FAILED:
                        failures[number] = told
                    elif kind == SAID:
                        _LOG.info("%s: %s", self._name(number), told)
                    else:
                        self._heard[number], self._works[number] = now, told
                        self._patience_s[number] = self._limits.call_s
            except (EOFError, OSError):
                return f"{self._name(number)} has ended {_how(self._processes[number])}"
        for number, failure in failures.items():
            return self._blamed(number, failure)
        for number, heard in enumerate(self._heard):
            if now - heard > self._patience_s[number]:
                return f"{self._name(number)} has not answered for {now - heard:.0f} s"
        return self._standstill([self._progress.seen(), *self._works])

    def _name(self, number: int) -> str:
        return f"rank {number + 1} of {len(self._links) + 1}"

    def _blamed(self, number: int, failure: Failure) -> str:
        """A rank has failed, perhaps in a collective because another one had ended."""
        time.sleep(_ENDING_S)
        for other, process in enumerate(self._processes):
            if process.poll() is not None:
                return f"{self._name(other)} has ended {_how(process)}"
        if failure.place:
            _LOG.error("where %s has failed:\n%s", self._name(number), failure.place)
        return f"{self._name(number)} has failed: {failure.sentence}"

    def _standstill(self, works: Sequence[Work]) -> str | None:
        """Who keeps the others waiting, if somebody has waited too long: those who are furthest behind.

        One that is behind with work that may take longer, such as a capture, is in its right.
        """
        late = next((work for work in works if work.is_late), None)
        if late is None:
            return None
        behind = min(work.number for work in works)
        ranks = [rank for rank, work in enumerate(works) if work.number == behind]
        if all(works[rank].name and not works[rank].is_late for rank in ranks):
            return None
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        verb = "stands" if len(ranks) == 1 else "stand"
        blamed = works[ranks[0]] if works[ranks[0]].name else late
        return f"{names} of {len(works)} {verb} still: {blamed.name} has been running for {blamed.seconds:.0f} s"


def _how(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, which the closing of its sockets may precede by a moment."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "its link"
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
