"""The choice of a group for ranks that have met: by the device, and by what the devices can do."""

import importlib

import torch
import torch.distributed as dist

from dspark.ops.opset import OpSet
from dspark.parallel.group import ALONE, RankGroup
from dspark.parallel.torch_group import TorchGroup


def open_group(
    ops: OpSet, device: torch.device, process_group: dist.ProcessGroup | None = None
) -> tuple[RankGroup, str]:
    """The group of an initialised process group, and a remark: empty, or why sums take longer than they could.

    Every rank calls this, and all get the same kind of group.

    Args:
        ops: the twins for `device`. device: of this rank; a process group over NCCL for accelerators, else over gloo.
        process_group: None is the default one.
    """
    group = TorchGroup(ops, process_group)
    if group.size == 1:
        return ALONE, ""
    if device.type != "cuda":
        return group, ""
    direct, failure = None, "another rank failed"
    try:
        direct = importlib.import_module("dspark.parallel.symmetric_group").SymmetricGroup(ops, device, process_group)
    except (RuntimeError, ImportError) as error:
        failure = str(error).partition("\n")[0]
    # A group must be of one kind on all ranks, so one that failed decides for all.
    num_failed = int(group.sum(torch.tensor([direct is None], dtype=torch.float32, device=device)))
    if num_failed or direct is None:
        return group, f"ranks exchange through NCCL: their devices cannot write into each other's memory ({failure})"
    return direct, ""
