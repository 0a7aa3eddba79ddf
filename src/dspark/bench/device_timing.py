"""Times on an accelerator: captured chains of launches, so that the host's share stays out of them."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

Call = Callable[[], object]
_REPLAYS = 5


def captured_us(calls: Sequence[Call]) -> float:
    """Microseconds a call of a chain that is captured once and replayed; the median of some replays.

    Give calls that touch different memory: a chain over one buffer measures the cache.
    """
    for call in calls:  # compiles, and settles allocations
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads of a process group go on meanwhile
        for call in calls:
            call()
    graph.replay()
    times = [_replay_ms(graph) for _ in range(_REPLAYS)]
    return median(times) / len(calls) * 1e3


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of a large copy on the device."""
    source = torch.empty(2**29, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (captured_us([partial(torch.neg, source, out=target)] * 4) * 1e-6)


def moving_us(num_bytes: int, device: torch.device) -> float:
    """Microseconds in which one kernel of the library moves `num_bytes`, half of them read and half written.

    What a launch of this size can reach at best: ramping up and draining take their share of a short one.
    """
    count = max(num_bytes // 8, 1)
    turns = max(2, min(24, int(3e8 // (8 * count)) + 1))
    sources = torch.empty(turns, count, dtype=torch.int32, device=device).random_()
    targets = torch.empty_like(sources)
    return captured_us([partial(torch.neg, sources[turn], out=targets[turn]) for turn in range(turns)])
