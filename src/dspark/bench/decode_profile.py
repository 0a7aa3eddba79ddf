"""Kernels of a decode step, by the profiler: how long the device is busy, how many launches, which are longest."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_MOST_KERNELS = 24
_NAME_LENGTH = 72


@dataclass(frozen=True)
class KernelTime:
    """All launches of one kernel in a step."""

    name: str
    launches: float
    us: float


@dataclass(frozen=True)
class StepProfile:
    """Means of a step.

    Attributes:
        wall_ms: of a step under the profiler, which costs time itself.
        busy_ms: sum of all kernels and copies.
        launches: how many of them.
        kernels: the longest ones.
    """

    wall_ms: float
    busy_ms: float
    launches: float
    kernels: tuple[KernelTime, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def profile_steps(step: Callable[[], object], num_steps: int) -> StepProfile:
    """Profile so many steps on an accelerator. Raises RuntimeError where the profiler cannot see it."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - began) / num_steps
    kernels = [
        KernelTime(event.key[:_NAME_LENGTH], event.count / num_steps, event.self_device_time_total / num_steps)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and event.self_device_time_total > 0
    ]
    if not kernels:
        raise RuntimeError("it saw no kernels")
    kernels.sort(key=lambda kernel: -kernel.us)
    return StepProfile(
        wall_ms,
        sum(kernel.us for kernel in kernels) / 1e3,
        sum(kernel.launches for kernel in kernels),
        tuple(kernels[:_MOST_KERNELS]),
    )
