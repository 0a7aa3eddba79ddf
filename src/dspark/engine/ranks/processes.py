"""The processes of followers: started with nothing but their own link, ended without leaving one behind."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from dspark.engine.ranks.beat import STOP
from dspark.engine.ranks.failure import TimeLimits
from dspark.engine.ranks.link import Link, make_links
from dspark.engine.ranks.meeting import Seat

_FOLLOW = "from dspark.engine.ranks.follower import main; main()"
_PATIENCE_AT_END_S = 5.0


def start_follower(seat: Seat, limits: TimeLimits) -> tuple[subprocess.Popen[bytes], Link]:
    """A fresh interpreter that follows; the program of this one is not run again in it.

    It inherits its own sockets alone, so that the end of any process closes every link that the process had.
    """
    link, others = make_links()
    process = subprocess.Popen(
        [sys.executable, "-c", _FOLLOW, *(str(end.fileno()) for end in others)],
        pass_fds=[end.fileno() for end in others],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    for end in others:
        end.close()
    link.calls.send_bytes(pickle.dumps((seat, limits)))
    return process, link


def end_followers(processes: Sequence[subprocess.Popen[bytes]], links: Sequence[Link]) -> None:
    """Ask every follower to end, and kill what does not."""
    for link in links:
        with contextlib.suppress(OSError):
            link.beats.send(STOP)
    until = time.monotonic() + _PATIENCE_AT_END_S
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for link in links:
        link.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of what is inside; a second one does not."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
