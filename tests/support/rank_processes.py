"""Several processes that form one group: a function runs in each, and its results come back by rank."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dspark.engine.device import ops_for
from dspark.parallel.torch_group import TorchGroup


def run_ranks(
    folder: Path, size: int, work: Callable[..., Any], *arguments: Any, device_type: Literal["cpu", "cuda"] = "cpu"
) -> list[Any]:
    """What `work(group, *arguments)` returns on each of `size` ranks, over gloo or over NCCL with a device each.

    Args:
        folder: empty; for the meeting of the ranks and their results. work: a function of an importable module.
    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    mp.spawn(_run, (folder, size, device_type, work, arguments), nprocs=size)
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]
    for rank, (_, failure) in enumerate(results):
        if failure:
            raise RuntimeError(f"rank {rank} of {size}:\n{failure}")
    return [result for result, _ in results]


def _run(
    rank: int, folder: Path, size: int, device_type: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    result, failure = None, ""
    try:
        result = work(TorchGroup(ops_for(device)), *arguments)
    except Exception:
        failure = traceback.format_exc()
    torch.save((result, failure), folder / f"rank{rank}.pt")
    dist.destroy_process_group()
