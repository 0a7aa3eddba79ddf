"""A replica in this process: an `AsyncEngine` behind the interface of one. What runs in every process of a fleet."""

from collections.abc import AsyncGenerator

from dspark.engine.async_engine import AsyncEngine, EngineDrainingError, EngineStatus
from dspark.engine.loop_thread import EngineDeadError
from dspark.engine.request import Emission
from dspark.serve.replicas.replica import ReplicaCall, ReplicaDownError


class LocalReplica:
    """An engine of this process.

    Args:
        engine: not shared with anybody.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def emissions(self, call: ReplicaCall) -> AsyncGenerator[list[tuple[int, Emission]], None]:
        """See `Replica.emissions`."""
        try:
            stream = await self.engine.submit(
                [call.prompt_ids], [call.params], request_id=call.name, priority=call.priority
            )
            with stream:
                yield []
                async for index, emission in stream:
                    yield [(index, emission)]
        except (EngineDeadError, EngineDrainingError) as error:
            raise ReplicaDownError(str(error)) from error

    async def status(self) -> EngineStatus:
        """See `Replica.status`."""
        return await self.engine.refresh()

    async def shutdown(self) -> None:
        """See `Replica.shutdown`."""
        await self.engine.shutdown()
