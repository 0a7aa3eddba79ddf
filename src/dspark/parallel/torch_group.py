"""A group over torch.distributed: gloo between processes on the host, NCCL between accelerators."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.opset import OpSet

# Elements from which a sum over more than two ranks is divided among them; two exchanges then take less than one.
DIVIDED_FROM = 2**18
# One operation under two names: the second is the only one before torch 2.12.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup:
    """All processes of a process group.

    Every rank gathers the others' tensors and adds them itself, so no library decides about the order of a sum.
    Calls may be captured in a graph where the backend's gathers may.
    """

    def __init__(self, ops: OpSet, process_group: dist.ProcessGroup | None = None) -> None:
        """Args:
        ops: the twins for the device that the tensors lie on.
        process_group: None is the default one, which must have been initialised.
        """
        self._ops = ops
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    def sum(self, x: Tensor) -> Tensor:
        """See `RankGroup.sum`."""
        if self.size > 2 and x.numel() >= DIVIDED_FROM:
            return self._divided_sum(x)
        return self._ops.sum_parts(self._gather(x))

    def gather_columns(self, x: Tensor) -> Tensor:
        """See `RankGroup.gather_columns`."""
        return self._gather(x).transpose(0, 1).flatten(1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """See `RankGroup.broadcast`."""
        return self._gather(x)[source]

    def _divided_sum(self, x: Tensor) -> Tensor:
        """Each rank sums one part of all elements for everyone: fewer values travel, and every sum is the same."""
        count = x.numel()
        values = F.pad(x.reshape(-1), (0, -count % self.size))
        addends = torch.empty_like(values)
        dist.all_to_all_single(addends.view(torch.uint8), values.view(torch.uint8), group=self._group)
        own = self._ops.sum_parts(addends.view(self.size, -1))
        return self._gather(own).view(-1)[:count].view(x.shape)

    def _gather(self, x: Tensor) -> Tensor:
        """[size, *shape] of all ranks; they travel as bytes, so that any dtype may."""
        if not x.numel():
            return x.expand(self.size, *x.shape)
        own = x.contiguous()
        everyone = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        _gather_single(everyone.view(-1).view(torch.uint8), own.view(-1).view(torch.uint8), group=self._group)
        return everyone
