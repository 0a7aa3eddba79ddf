"""A group of accelerators of one host that write into each other's memory; what is too long for that goes by NCCL.

Importing this needs triton.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from dspark.ops.opset import OpSet
from dspark.ops.triton.ranks import SIDES, Inboxes
from dspark.parallel.torch_group import TorchGroup

# Words of the longest message that is written straight into the other ranks' memory, 4 MiB of values: what travels
# so has twice the bytes, and beyond a few MiB that outweighs what it saves (`dspark bench collectives`).
CAPACITY = 2**20


class SymmetricGroup:
    """One launch a sum or exchange. Sums have the bits of `TorchGroup`, so messages may go either way."""

    def __init__(self, ops: OpSet, device: torch.device, process_group: dist.ProcessGroup | None = None) -> None:
        """Args:
            ops: the twins for accelerators. device: of this rank.
            process_group: over NCCL; None is the default one, which must have been initialised.
        Raises:
            RuntimeError: the devices cannot reach each other's memory.
        """
        self._far = TorchGroup(ops, process_group)
        self.rank, self.size = self._far.rank, self._far.size
        # Peers' memory is read and written by ordinary instructions; no multicast object is ever needed.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._inbox = symmetric_memory.empty(SIDES * self.size * CAPACITY, dtype=torch.int64, device=device)
        ranks = process_group or dist.group.WORLD
        assert ranks is not None
        shared = symmetric_memory.rendezvous(self._inbox, ranks)
        self._inbox.zero_()
        self._inboxes = Inboxes(list(shared.buffer_ptrs), self.rank, CAPACITY, device)
        # Nobody writes before all have cleared their inbox.
        torch.cuda.synchronize(device)
        self._far.sum(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def sum(self, x: Tensor) -> Tensor:
        """See `RankGroup.sum`."""
        return self._inboxes.sum(x) if self._inboxes.takes_sum(x) else self._far.sum(x)

    def gather_columns(self, x: Tensor) -> Tensor:
        """See `RankGroup.gather_columns`."""
        if self._inboxes.takes(x) and x.shape[1] * x.dtype.itemsize % 4 == 0:
            return self._inboxes.gather_columns(x)
        return self._far.gather_columns(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """See `RankGroup.broadcast`."""
        if not self._inboxes.takes(x):
            return self._far.broadcast(x, source)
        everyone = self._inboxes.gather_columns(x.contiguous().view(1, -1))
        return everyone.view(self.size, *x.shape)[source]
