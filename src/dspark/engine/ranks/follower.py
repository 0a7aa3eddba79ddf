"""A follower: a process that holds its share of a model and of every store, and repeats the calls of rank 0.

It knows no request. A call is a function and plain values; the function runs on the part that the call names. The
process ends when rank 0 says so, when rank 0 is gone, and when rank 0 is silent for too long, whatever its main thread
is doing: collectives and kernels may wait for ever for a rank that has ended.
"""

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import torch

from dspark.config.errors import DSparkError
from dspark.engine.ranks.beat import FAILED, PING, PONG, SAID, Failure, Progress
from dspark.engine.ranks.failure import TimeLimits
from dspark.engine.ranks.link import Call, Link, decode
from dspark.engine.ranks.meeting import RankPlace, Seat, join

HERE = b"here"


class Follower:
    """The parts that calls find, by number; part 0 is the rank's own place."""

    def __init__(self, place: RankPlace) -> None:
        self._parts: dict[int, Any] = {0: place}

    def run(self, call: Call) -> Any:
        """Run a call on the part that it names; what it makes stays here."""
        if call.forgets:
            for number in call.forgets:
                del self._parts[number]
            gc.collect()
        result = call.function(self._parts[call.part], *call.args)
        if not call.makes:
            return result
        self._parts[call.makes] = result
        return None


def main() -> None:
    """Follow until the end; the arguments are the two descriptors of the link."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 answers them, and may want to end its requests first
    link = Link(int(sys.argv[1]), int(sys.argv[2]))
    progress = Progress()
    try:
        seat, limits = pickle.loads(link.calls.recv_bytes())
    except (EOFError, ConnectionError):
        _end(0)
    watch = threading.Thread(target=_watch, args=(link, seat, limits, progress), daemon=True)
    watch.start()
    try:
        torch.set_num_threads(seat.num_threads)
        link.calls.send_bytes(HERE)
        with progress.working("meeting the other ranks", limits.setup_s):
            follower = Follower(join(seat, lambda news: link.beats.send((SAID, news))))
        while True:
            call = decode(link.calls.recv_bytes())
            with progress.working(call.function.__qualname__, call.limit_s):
                result = follower.run(call)
            if call.wants_reply:
                link.calls.send_bytes(pickle.dumps(result))
    except (EOFError, ConnectionError):
        watch.join(limits.call_s)  # it tells why, if there is a reason, and ends this process
        _end(0)
    except BaseException as error:
        is_plain = isinstance(error, DSparkError)
        told = str(error) if is_plain else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # rank 0 has ended, which is why this failed; the watch tells it
            link.beats.send((FAILED, Failure(told, "" if is_plain else traceback.format_exc())))
        watch.join(limits.call_s)  # rank 0 has heard it by then, and ended this process
        _end(1)


def _watch(link: Link, seat: Seat, limits: TimeLimits, progress: Progress) -> None:
    """Answer rank 0's signs of life, and end the process when there are none."""
    name = f"rank {seat.rank} of {seat.size}"
    heard = looked = time.monotonic()
    try:
        while True:
            has_come = link.beats.poll(limits.beat_s)
            now = time.monotonic()
            if has_come:
                if link.beats.recv() != PING:
                    _end(0)
                link.beats.send((PONG, progress.seen()))
                heard = now
            elif now - looked > 4 * limits.beat_s:
                heard = now  # this process itself stood still, and so did its clock of rank 0
            elif now - heard > limits.call_s:
                _end(1, f"{name} ends: rank 0 has not answered for {now - heard:.0f} s")
            looked = now
    except (EOFError, OSError):
        _end(1, f"{name} ends: rank 0 has ended")


def _end(code: int, sentence: str = "") -> NoReturn:
    """End the process at once: nothing is left to be tidied up, and a device may never answer again."""
    if sentence:
        sys.stderr.write(f"dspark: {sentence}\n")
        sys.stderr.flush()
    os._exit(code)
