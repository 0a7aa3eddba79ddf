"""Rank 0's team: the processes of the other ranks, the calls that all ranks run, and their common end.

A process has one team at most. Engines that need as many ranks share it, because starting processes takes seconds; what
an engine holds on the ranks is gone as soon as the engine is.
"""

import atexit
import gc
import logging
import os
import pickle
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from dspark.config.errors import DSparkError
from dspark.engine.ranks.beat import Progress
from dspark.engine.ranks.failure import RankError, TimeLimits
from dspark.engine.ranks.follower import HERE
from dspark.engine.ranks.link import Call, Link, encode
from dspark.engine.ranks.meeting import RankPlace, Seat, join, leave, open_store
from dspark.engine.ranks.processes import end_followers, start_follower, uninterrupted
from dspark.engine.ranks.watch import Watch

_LOG = logging.getLogger("dspark.engine")

# How long an error here waits for the watch to see that another rank has caused it.
_BLAME_S = 2.0
# How long a device may need to give its thread back once what it waits for is aborted.
_GRACE_S = 5.0


class Team:
    """All ranks of the engines of a process, seen from rank 0.

    Attributes:
        place: rank 0's own.
        failure: why nothing can run any more; None while all is well.
    """

    def __init__(self, size: int, device_type: str, limits: TimeLimits) -> None:
        """Start the other ranks and meet them.

        Raises:
            RankError: one of them did not come.
        """
        self.size = size
        self.device_type = device_type
        self.limits = limits
        self.failure: RankError | None = None
        self._progress = Progress()
        self._lock = threading.RLock()
        self._is_stepping = False
        self._num_parts = 0
        self._held: set[int] = set()
        self._gone: deque[int] = deque()
        self._longest: dict[Any, float] = {}
        self._listeners: list[weakref.WeakMethod[Callable[[RankError], None]]] = []
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        store = open_store(size, limits.setup_s)
        threads = max(torch.get_num_threads() // size, 1)
        seats = [Seat(rank, size, device_type, store.port, limits.setup_s, threads) for rank in range(size)]
        for seat in seats[1:]:
            process, link = start_follower(seat, limits)
            self._processes.append(process)
            self._links.append(link)
        atexit.register(self.close)
        self._watch = Watch(self._processes, self._links, self._progress, limits, self._tidy, self._fail)
        self._watch.start()
        with self._fatal():
            for link in self._links:
                assert self._receive(link) == HERE
            with self._progress.working("meeting the other ranks", limits.setup_s):
                self.place: RankPlace = join(seats[0], self._say, store)
        if self.place.remark:
            _LOG.warning("%s", self.place.remark)

    def _say(self, news: str) -> None:
        _LOG.info("rank 0 of %d: %s", self.size, news)

    @property
    def process_ids(self) -> list[int]:
        """Of the followers, rank 1 first."""
        return [process.pid for process in self._processes]

    @property
    def is_used(self) -> bool:
        """Whether ranks hold anything."""
        return len(self._held) > len(self._gone)

    def on_failure(self, listener: Callable[[RankError], None]) -> None:
        """Call an object's method, in another thread, as soon as the team has failed; the object is not kept alive."""
        self._listeners.append(weakref.WeakMethod(listener))

    def make(self, part: int, own: Any, make: Callable[..., Any], *args: Any) -> tuple[int, Any]:
        """Let every rank make a part from a part; returns its number and rank 0's own."""
        with self._lock, self._fatal():
            self._num_parts += 1
            number = self._num_parts
            result = self._send(Call(part, make, args, self.limits.setup_s, wants_reply=True, makes=number), own)
            self._replies()
            self._held.add(number)
            return number, result

    def forget(self, number: int) -> None:
        """Forget a part soon; may be called from anywhere at any time, a finaliser included."""
        self._gone.append(number)

    def run(self, part: int, own: Any, function: Callable[..., Any], *args: Any, kind: Any = None) -> Any:
        """Run `function(part, *args)` on every rank.

        Args:
            part: its number. own: rank 0's part.
            function: of a module; its collectives must be the same on all ranks.
            args: plain values.
            kind: what the duration depends on: a call whose kind has ended before must end soon.
        Returns:
            rank 0's result.
        Raises:
            RankError: a rank has ended or stands still.
        """
        key = (part, function, kind)
        with self._lock, uninterrupted(), self._fatal():
            began = time.monotonic()
            result = self._send(Call(part, function, args, self.limits.of_call(self._longest.get(key))), own)
            self._longest[key] = max(self._longest.get(key, 0.0), time.monotonic() - began)
            if not self._is_stepping:
                self._progress.end()
            return result

    def tell(self, part: int, function: Callable[..., Any], *args: Any) -> None:
        """Run `function(part, *args)` on the followers; nobody waits for it."""
        with self._lock, uninterrupted(), self._fatal():
            self._post(Call(part, function, args, self.limits.setup_s))
            if not self._is_stepping:
                self._progress.end()

    def ask(self, part: int, own: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`run`, with the results of all ranks, each a plain value; it may take long, and Ctrl-C ends the team."""
        with self._lock, self._fatal():
            result = self._send(Call(part, function, args, self.limits.setup_s, wants_reply=True), own)
            return [result, *self._replies()]

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of an engine: from its first call on it must get on, whatever it waits for the device.

        Raises:
            RankError: a rank has ended or stands still; what it caused here is told as its failure.
        """
        with self._lock:
            self._require_well()
            self._is_stepping = True
            try:
                yield
            except Exception as error:
                if self.failure is not None and not isinstance(error, RankError):
                    raise RankError(str(self.failure)) from error
                raise
            finally:
                self._is_stepping = False
                self._progress.end()
            self._require_well()

    def _send(self, call: Call, own: Any) -> Any:
        """Hand a call to the followers, then run it here."""
        self._post(call)
        return call.function(own, *call.args)

    def _post(self, call: Call) -> None:
        self._progress.begin(call.function.__qualname__, call.limit_s)
        message = encode(self._with_gone(call))
        for link in self._links:
            link.calls.send_bytes(message)

    def _with_gone(self, call: Call) -> Call:
        """The call, with the parts that have been given up since the last one."""
        if not self._gone:
            return call
        gone = tuple(self._gone.popleft() for _ in range(len(self._gone)))
        self._held.difference_update(gone)
        return replace(call, forgets=gone)

    def _replies(self) -> list[Any]:
        """What the followers answer, rank 1 first."""
        replies = [pickle.loads(self._receive(link)) for link in self._links]
        self._progress.end()
        return replies

    def _receive(self, link: Link) -> bytes:
        while not link.calls.poll(self.limits.beat_s):
            self._require_well()
        return link.calls.recv_bytes()

    def _tidy(self) -> None:
        """Let the ranks forget what is gone while nobody calls; the watch's own call may not wait for anything."""
        if self._gone and self._lock.acquire(blocking=False):
            try:
                with suppress(RankError):  # whoever ends the team meanwhile knows
                    self.run(0, self.place, _collect)
            finally:
                self._lock.release()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Whatever goes wrong inside ends the team: the ranks are not at the same place any more."""
        self._require_well()
        try:
            yield
        except BaseException as error:
            is_own = isinstance(error, DSparkError) or not isinstance(error, Exception)
            if not is_own:
                self._await_blame()
            if self.failure is None:
                self._fail(f"rank 0 of {self.size} has failed: {type(error).__name__}: {error}")
                raise
            if is_own:
                raise
            raise RankError(str(self.failure)) from error
        self._require_well()

    def _await_blame(self) -> None:
        """An error of a collective may be another rank's end, which the watch is about to see."""
        until = time.monotonic() + _BLAME_S
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.01)

    def _require_well(self) -> None:
        if self.failure is not None:
            raise RankError(str(self.failure))

    def _fail(self, sentence: str) -> None:
        """End the team: the followers are killed, and this rank is freed from what it waits for."""
        self.failure = RankError(f"{sentence}; the engine has ended on all ranks: start it again")
        self._watch.stop()
        for process in self._processes:
            process.kill()
        if self._watch.is_this_thread:
            _LOG.error("%s", self.failure)
            for listener in filter(None, [reference() for reference in self._listeners]):
                listener(self.failure)
            if self.device_type == "cuda":
                self._free_device()

    def _free_device(self) -> None:
        """Abort what the device waits for; where that does not help, only the end of this process does."""
        threading.Thread(target=leave, args=(self.device_type,), daemon=True).start()
        until = time.monotonic() + _GRACE_S
        while self._progress.seen().name:
            if time.monotonic() > until:
                _LOG.critical("the device does not answer any more: this process ends")
                os._exit(1)
            time.sleep(0.05)

    def close(self) -> None:
        """End all other ranks; may be called again."""
        atexit.unregister(self.close)
        self._watch.stop()
        if self.failure is None:
            self.failure = RankError("the engine's ranks have been shut down: make another engine")
        end_followers(self._processes, self._links)
        leave(self.device_type)


def _collect(place: RankPlace) -> None:
    """Give memory back that nobody holds any more."""
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()


_OWN: list[Team] = []


def team_of(size: int, device_type: str, limits: TimeLimits) -> Team:
    """The team of this process; a new one where there is none, or where it has failed.

    Raises:
        RankError: engines of another number of ranks still use it.
    """
    if _OWN:
        team = _OWN[0]
        if team.failure is None and (team.size, team.device_type, team.limits) == (size, device_type, limits):
            return team
        gc.collect()  # an engine of several ranks refers to itself, and may be gone but for that
        if team.failure is None and team.is_used:
            raise RankError(
                f"this process has an engine of {team.size} ranks on {team.device_type}: delete it before one of "
                f"{size} ranks on {device_type} is made, or use another process"
            )
        team.close()
        _OWN.clear()
    _OWN.append(Team(size, device_type, limits))
    return _OWN[0]
