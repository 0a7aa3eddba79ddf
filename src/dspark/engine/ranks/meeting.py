"""How the processes of a team find each other, and the group over which they exchange tensors."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from dspark.engine.ranks.failure import RankError
from dspark.ops.opset import ops_for
from dspark.parallel.group import RankGroup
from dspark.parallel.opening import open_group

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """One rank's seat in a team.

    Attributes:
        rank, size: this rank, from 0, and how many there are.
        device_type: "cpu", or "cuda", where rank r takes device r.
        port: of rank 0's store on this machine.
        setup_s: seconds until everybody must be there.
        num_threads: CPU threads of one operation.
    """

    rank: int
    size: int
    device_type: str
    port: int
    setup_s: float
    num_threads: int

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors lie."""
        return torch.device("cuda", self.rank) if self.device_type == "cuda" else torch.device("cpu")


@dataclass(frozen=True)
class RankPlace:
    """A rank that has met the others.

    Attributes:
        remark: why the group is slower than it could be, or nothing.
        say: tells rank 0's log how far a long piece of work is.
    """

    seat: Seat
    group: RankGroup
    remark: str = ""
    say: Callable[[str], None] = field(kw_only=True)

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors lie."""
        return self.seat.device


def open_store(size: int, setup_s: float) -> dist.TCPStore:
    """Rank 0's store, at a free port of this machine.

    Raises:
        RankError: this process is part of another group already.
    """
    if dist.is_initialized():
        raise RankError(
            "torch.distributed is in use in this process already: run an engine of several ranks in a process of its "
            "own, started without torchrun"
        )
    limit = timedelta(seconds=setup_s)
    return dist.TCPStore(_HOST, 0, size, is_master=True, timeout=limit, wait_for_workers=False)


def join(seat: Seat, say: Callable[[str], None], store: dist.TCPStore | None = None) -> RankPlace:
    """Meet the other ranks; returns when all are there.

    Args:
        say: see `RankPlace`.
        store: rank 0's own; the others find it at its port.
    """
    limit = timedelta(seconds=seat.setup_s)
    if store is None:
        store = dist.TCPStore(_HOST, seat.port, seat.size, is_master=False, timeout=limit, wait_for_workers=False)
    backend, device_id = "gloo", None
    if seat.device_type == "cuda":
        torch.cuda.set_device(seat.device)
        backend, device_id = "nccl", seat.device
    else:
        # All ranks are on this machine, whatever its name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend, store=store, rank=seat.rank, world_size=seat.size, timeout=limit, device_id=device_id
    )
    return RankPlace(seat, *open_group(ops_for(seat.device), seat.device), say=say)


def leave(device_type: str) -> None:
    """Forget the group, whose other ranks are gone: accelerators would wait for them if it were not aborted."""
    if dist.is_initialized():
        end = dist.distributed_c10d._abort_process_group if device_type == "cuda" else dist.destroy_process_group
        end()
