"""Replicas as Ray Serve deployments: each a process of its own, on any machine of a cluster, restarted when it dies.

Every replica is a deployment with a handle of its own, because the fleet chooses by prefix who gets a request; Ray
Serve keeps the processes, their health and their restarts. Ray's own HTTP door stays shut: the address is the fleet's.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError

from dspark.config.errors import DSparkError
from dspark.config.question import counted
from dspark.engine.async_engine import AsyncEngine, EngineStatus
from dspark.engine.request import Emission
from dspark.serve.replicas.local import LocalReplica
from dspark.serve.replicas.replica import ReplicaCall, ReplicaDownError

_APPLICATION = "dspark-replica-{}"
_STARTING_S = 600.0
_HEALTH_PERIOD_S = 2.0
_SHUTDOWN_S = 10.0


class EngineProcess:
    """What runs in a replica's process.

    Args:
        options: arguments of `AsyncEngine`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._replica = LocalReplica(AsyncEngine(**options))

    async def emissions(self, call: ReplicaCall) -> AsyncGenerator[list[tuple[int, Emission]], None]:
        """See `Replica.emissions`."""
        async for part in self._replica.emissions(call):
            yield part

    async def status(self) -> EngineStatus:
        """See `Replica.status`."""
        return await self._replica.status()

    async def process_id(self) -> int:
        """Of this process on its machine."""
        return os.getpid()

    async def check_health(self) -> None:
        """Asked by Ray Serve, which restarts a replica that raises."""
        status = await self._replica.status()
        if status.state == "dead":
            raise RuntimeError(status.reason)


class RayReplica:
    """The fleet's end of one deployment.

    Args:
        handle: of the deployment.
        name: of its application.
    """

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self._name = name

    async def emissions(self, call: ReplicaCall) -> AsyncGenerator[list[tuple[int, Emission]], None]:
        """See `Replica.emissions`."""
        parts = self._handle.options(stream=True).emissions.remote(call)
        try:
            async for part in parts:
                yield part
        except GeneratorExit:
            parts.cancel()
            raise
        except asyncio.CancelledError:
            parts.cancel()
            raise
        except Exception as error:
            raise _translated(error) from error

    async def status(self) -> EngineStatus:
        """See `Replica.status`."""
        try:
            found: EngineStatus = await self._handle.status.remote()
        except Exception as error:
            raise _translated(error) from error
        return found

    async def process_id(self) -> int:
        """Of the replica's process. Raises ReplicaDownError."""
        try:
            return int(await self._handle.process_id.remote())
        except Exception as error:
            raise _translated(error) from error

    async def shutdown(self) -> None:
        """See `Replica.shutdown`."""
        await asyncio.to_thread(serve.delete, self._name)


def start_replicas(count: int, options: dict[str, Any], *, gpus_each: int = 0, max_requests: int) -> list[RayReplica]:
    """Start engines, on the cluster that RAY_ADDRESS names or on this machine alone.

    Args:
        count: of replicas.
        options: arguments of `AsyncEngine`, the same for all.
        gpus_each: that one replica takes, one for each of its ranks; Ray shows a replica its own devices alone.
        max_requests: that one replica is given at once.
    Raises:
        DSparkError: they did not come up; the message says why.
    """
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    require_room(count, gpus_each)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    replicas = []
    for number in range(count):
        name = _APPLICATION.format(number)
        deployment = serve.deployment(
            name=name,
            num_replicas=1,
            max_ongoing_requests=max_requests + 16,
            health_check_period_s=_HEALTH_PERIOD_S,
            graceful_shutdown_timeout_s=_SHUTDOWN_S,
            ray_actor_options={"num_cpus": 0, "num_gpus": gpus_each},
        )(EngineProcess)
        try:
            handle = serve.run(deployment.bind(options), name=name, route_prefix=None, blocking=False)
        except RuntimeError as error:
            raise DSparkError(f"replica {number} has not come up: {error}") from error
        replicas.append(RayReplica(handle, name))
    return replicas


def require_room(count: int, gpus_each: int) -> None:
    """Refuse what Ray would wait for: ranks of a replica need devices of one machine. Raises DSparkError."""
    if not gpus_each:
        return
    found = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    room = sum(number // gpus_each for number in found)
    if room < count:
        raise DSparkError(
            f"{count} replicas of {counted(gpus_each, 'device')} each are asked for and the machines of this cluster "
            f"({', '.join(map(str, found))} devices) have room for {room}: give fewer --replicas, a smaller "
            "--tensor-parallel-size, or the address of a larger cluster in RAY_ADDRESS"
        )


def stop_ray() -> None:
    """Leave the cluster, and end it where this process began it."""
    serve.shutdown()
    ray.shutdown()


def _translated(error: Exception) -> Exception:
    """A refusal of the engine as it was raised there; anything else means that the replica is gone."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, ReplicaDownError | DSparkError):
            return cause
        return ReplicaDownError(f"it failed: {type(cause).__name__}: {cause}")
    if isinstance(error, DSparkError | ReplicaDownError):
        return error
    kind = "its process is gone" if isinstance(error, RayError) else "it cannot be reached"
    return ReplicaDownError(f"{kind}: {type(error).__name__}")
