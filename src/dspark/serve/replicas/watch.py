"""Which replicas of a fleet are up, and what each said of itself last."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from dspark.engine.async_engine import EngineStatus
from dspark.serve.replicas.replica import Replica, ReplicaDownError

_LOG = logging.getLogger("dspark.serve")

POLL_INTERVAL_S = 1.0
# A replica answers between two steps of its engine; one that takes this long hangs, or its process does.
POLL_TIMEOUT_S = 10.0


class ReplicaWatch:
    """Asks every replica how it is, again and again.

    Args:
        replicas: to be watched.
        on_loss: called with the number of a replica that was up and is not any more.
    Attributes:
        known: last status of each replica that ever answered.
        down: why a replica is not up.
    """

    def __init__(self, replicas: Sequence[Replica], on_loss: Callable[[int], None]) -> None:
        self.known: dict[int, EngineStatus] = {}
        self.down: dict[int, str] = {}
        self._replicas = replicas
        self._on_loss = on_loss
        self._poller: asyncio.Task[None] | None = None

    @property
    def up(self) -> list[int]:
        """Numbers of the replicas that answered last time."""
        return [number for number in sorted(self.known) if number not in self.down]

    async def start(self) -> None:
        """Wait for every replica's first answer, then watch. Raises ReplicaDownError where none comes up."""
        if self._poller is not None:
            return
        await self.poll(None)
        if not self.up:
            raise ReplicaDownError(f"no replica has come up: {'; '.join(dict.fromkeys(self.down.values()))}")
        self._poller = asyncio.create_task(self._keep_polling())

    def stop(self) -> None:
        """Watch no more."""
        if self._poller is not None:
            self._poller.cancel()

    async def poll(self, timeout_s: float | None) -> None:
        """Ask all of them now."""
        await asyncio.gather(*(self._ask(number, timeout_s) for number in range(len(self._replicas))))

    def mark_down(self, number: int, reason: str) -> None:
        """A replica was found gone."""
        if number not in self.down:
            _LOG.error("replica %d is down: %s", number, reason)
            self._on_loss(number)
        self.down[number] = reason

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.poll(POLL_TIMEOUT_S)

    async def _ask(self, number: int, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                status: object = await self._replicas[number].status()
        except TimeoutError:
            self.mark_down(number, "it does not answer" if timeout_s is None else f"no answer for {timeout_s:g} s")
            return
        except ReplicaDownError as error:
            self.mark_down(number, str(error))
            return
        except Exception as error:
            # Whatever one replica answers, the others must go on being watched.
            self.mark_down(number, f"its status cannot be had: {type(error).__name__}: {error}")
            return
        if not isinstance(status, EngineStatus):
            self.mark_down(number, f"it answers with {type(status).__name__} in place of a status")
            return
        self.known[number] = status
        if status.state in ("dead", "draining"):
            self.mark_down(number, status.reason or f"its engine is {status.state}")
        elif self.down.pop(number, None) is not None:
            _LOG.warning("replica %d is up again", number)
