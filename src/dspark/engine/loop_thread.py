"""The one thread that owns an engine loop: commands go in between steps, emissions come out after each step."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from dspark.config.sampling import SamplingParams
from dspark.engine.request import Emission
from dspark.engine.status import LoopStatus
from dspark.scheduler.plan import RequestId

_LOG = logging.getLogger("dspark.engine")

# A status is read far more seldom than steps are run, and making one copies the acceptance counts.
STATUS_INTERVAL_S = 0.1


class StepLoop(Protocol):
    """What the thread and its commands use of an `EngineLoop`."""

    @property
    def has_work(self) -> bool:
        """Is anything running or waiting?"""
        ...

    def add_samples(
        self,
        request_ids: Sequence[RequestId],
        prompt_ids: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
    ) -> Any:
        """Take in the samples of one prompt, all or none."""
        ...

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request; True when it was there."""
        ...

    def step(self) -> list[Emission]:
        """One step of the engine."""
        ...

    def status(self) -> LoopStatus:
        """Plain numbers about the loop."""
        ...


Command = Callable[[StepLoop], Any]


class EngineDeadError(RuntimeError):
    """A step of the engine has failed, or the engine was shut down: nothing can run on it any more."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step handed out, and when it ended (seconds of the monotonic clock)."""

    emissions: list[Emission]
    ended_at: float


class LoopThread:
    """Runs a loop until it is stopped or a step fails; every posted command is answered, whatever happens.

    Args:
        loop: touched by this thread alone from `start` on.
        on_step: called in this thread after a step that emitted; must return quickly.
        on_death: called in this thread, once, with the error of a failed step.
    Attributes:
        step_began: monotonic time at which the step in progress began; None between steps.
    """

    def __init__(
        self,
        loop: StepLoop,
        on_step: Callable[[StepOutcome], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._on_step = on_step
        self._on_death = on_death
        self._commands: SimpleQueue[tuple[Command, Future[Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended: EngineDeadError | None = None
        self._status = loop.status()
        self._status_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self.step_began: float | None = None

    @property
    def status(self) -> LoopStatus:
        """The loop's numbers, at most `STATUS_INTERVAL_S` and one step old; exact while the loop is idle."""
        return self._status

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def post(self, command: Command) -> Future[Any]:
        """Run a command between two steps, in the order of posting.

        Returns:
            the command's result or error; EngineDeadError where it can not run any more.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is None:
                self._commands.put((command, future))
            else:
                future.set_exception(EngineDeadError(str(self._ended)))  # one for each, or their tracebacks add up
        return future

    def refresh(self) -> Future[Any]:
        """Take the loop's numbers anew between two steps; the future ends when `status` has them."""
        return self.post(lambda loop: self._take_status())

    def stop(self) -> None:
        """End after the step in progress."""
        self._commands.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; True when the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason = EngineDeadError("the engine is shut down")
        try:
            while self._take_commands():
                if self._loop.has_work:
                    self._step()
                self._publish()
        except BaseException as error:
            # Whatever it is, the loop's state is unknown now: nothing may run on it again, and nobody may wait for it.
            _LOG.exception("a step of the engine failed; every request is ended")
            reason = EngineDeadError(f"the engine has failed ({type(error).__name__}: {error}); restart it")
            self._on_death(reason)
        finally:
            self.step_began = None
            self._end(reason)

    def _take_commands(self) -> bool:
        """Run what was posted, waiting for it while there is no other work; False when the thread should end."""
        while True:
            if self._loop.has_work and self._commands.empty():
                return True
            item = self._commands.get()
            if item is None:
                return False
            _answer(self._loop, *item)
            if not self._loop.has_work:
                self._publish()

    def _step(self) -> None:
        self.step_began = time.monotonic()
        emissions = self._loop.step()
        self.step_began = None
        if emissions:
            self._on_step(StepOutcome(emissions, time.monotonic()))

    def _publish(self) -> None:
        if not self._loop.has_work or time.monotonic() - self._status_at >= STATUS_INTERVAL_S:
            self._take_status()

    def _take_status(self) -> None:
        self._status, self._status_at = self._loop.status(), time.monotonic()

    def _end(self, reason: EngineDeadError) -> None:
        """Refuse what is still posted, and all that comes."""
        with self._lock:
            self._ended = reason
            while not self._commands.empty():
                item = self._commands.get()
                if item is not None and item[1].set_running_or_notify_cancel():
                    item[1].set_exception(EngineDeadError(str(reason)))


def _answer(loop: StepLoop, command: Command, future: Future[Any]) -> None:
    """Run one command; its errors are its caller's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = command(loop)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
