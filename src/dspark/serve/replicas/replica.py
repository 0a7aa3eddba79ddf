"""What a fleet asks of one of its engines, wherever it runs."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from dspark.config.sampling import SamplingParams
from dspark.engine.async_engine import EngineStatus
from dspark.engine.request import Emission


class ReplicaDownError(RuntimeError):
    """The replica is gone, or cannot be reached: what it was asked may be asked of another."""


@dataclass(frozen=True)
class ReplicaCall:
    """The samples of one prompt.

    Attributes:
        name: of the request; each attempt has its own.
        prompt_ids: token ids.
        params: of the samples.
        priority: lower values run first.
    """

    name: str
    prompt_ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    priority: int


class Replica(Protocol):
    """An engine somewhere."""

    def emissions(self, call: ReplicaCall) -> AsyncGenerator[list[tuple[int, Emission]], None]:
        """Run a call: an empty list once it is accepted, then (sample, emission) in lists. Closing it aborts the call.

        Raises:
            ReplicaDownError: the replica is gone; anything else is the engine's own refusal.
        """
        ...

    async def status(self) -> EngineStatus:
        """The engine's status. Raises ReplicaDownError."""
        ...

    async def shutdown(self) -> None:
        """End it; may be called again."""
        ...
