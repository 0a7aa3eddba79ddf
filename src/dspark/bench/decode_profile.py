"""Kernels of a decode step, by the profiler: how long the device is busy, how many launches, which are longest."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dspark.bench.kernel_names import readable_name

_MOST_KERNELS = 24


@dataclass(frozen=True)
class KernelTime:
    """All launches of one operation's kernels in a step."""

    name: str
    launches: float
    us: float


@dataclass(frozen=True)
class StepProfile:
    """Means of a step.

    Attributes:
        wall_ms: of a step under the profiler, which costs time itself.
        busy_ms: in which at least one kernel or copy runs.
        window_ms: between the first begin and the last end of a kernel.
        kernels_ms: sum of all of them; more than busy_ms where they overlap.
        launches: how many of them.
        kernels: the longest ones.
    """

    wall_ms: float
    busy_ms: float
    window_ms: float
    kernels_ms: float
    launches: float
    kernels: tuple[KernelTime, ...]

    @property
    def idle_share(self) -> float:
        """Share of the window in which nothing runs; the profiler adds to it."""
        return 1.0 - self.busy_ms / self.window_ms


def profile_steps(step: Callable[[], object], num_steps: int) -> StepProfile:
    """Profile so many steps on an accelerator. Raises RuntimeError where the profiler cannot see it."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - began) / num_steps
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return summarise(spans, num_steps, wall_ms)


def summarise(spans: Iterable[tuple[str, float, float]], num_steps: int, wall_ms: float) -> StepProfile:
    """Means of a step.

    Args:
        spans: name, begin and end in microseconds of every kernel and copy of `num_steps` steps.
        wall_ms: of one of them.
    Raises:
        RuntimeError: there are none.
    """
    spans = [span for span in spans if span[2] > span[1]]
    if not spans:
        raise RuntimeError("it saw no kernels")
    times: dict[str, list[float]] = defaultdict(list)
    for name, began, ended in spans:
        times[readable_name(name)].append(ended - began)
    kernels = [KernelTime(name, len(us) / num_steps, sum(us) / num_steps) for name, us in times.items()]
    kernels.sort(key=lambda kernel: -kernel.us)
    return StepProfile(
        wall_ms,
        _covered_us(spans) / num_steps / 1e3,
        (max(span[2] for span in spans) - min(span[1] for span in spans)) / num_steps / 1e3,
        sum(kernel.us for kernel in kernels) / 1e3,
        sum(kernel.launches for kernel in kernels),
        tuple(kernels[:_MOST_KERNELS]),
    )


def _covered_us(spans: list[tuple[str, float, float]]) -> float:
    """Microseconds in which something runs; what overlaps counts once."""
    covered, reached = 0.0, float("-inf")
    for _, began, ended in sorted(spans, key=lambda span: span[1]):
        covered += max(ended - max(began, reached), 0.0)
        reached = max(reached, ended)
    return covered
