"""What memory a device or a host has left, and what a piece of work takes of it: the only reader of both."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from dspark.config import Config

# Share of a host's available memory that stays free: for what a pass works in, and for other processes.
_HOST_MARGIN_SHARE = 0.25
# What confines the processes of a container.
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Bytes of a device or a host at one moment.

    Attributes:
        place: what it is, in words.
        total, free: of it.
        margin: what the engine leaves free.
        margin_setting: of the configuration, that decides the margin; empty where none does.
    """

    place: str
    total: int
    free: int
    margin: int
    margin_setting: str = ""

    @property
    def spendable(self) -> int:
        """What the engine may still take."""
        return max(self.free - self.margin, 0)

    def for_each(self, num_ranks: int, device: torch.device) -> "Room":
        """What each of several ranks has: a device like this one, or its part of the host that all of them share."""
        if num_ranks == 1:
            return self
        if device.type == "cuda":
            return replace(self, place=f"each rank's {self.place}")
        total, free, margin = (part // num_ranks for part in (self.total, self.free, self.margin))
        return replace(self, place=f"each rank's part of {self.place}", total=total, free=free, margin=margin)


class DeviceMemory(Protocol):
    """Memory that an engine's stores lie in.

    measures: whether `need_of` sees what work takes; else that must fit in the margin.
    """

    measures: bool

    def room(self) -> Room:
        """What is there now."""
        ...

    def need_of(self, work: Callable[[], object]) -> int:
        """Do some work: the most bytes that it held at any moment, what it leaves behind included."""
        ...


class AcceleratorMemory:
    """Memory of a GPU; the margin is the share that `gpu_memory_utilization` leaves."""

    measures = True

    def __init__(self, device: torch.device, utilization: float) -> None:
        self._device = device
        self._utilization = utilization

    def room(self) -> Room:
        """See `DeviceMemory.room`."""
        _give_back()
        free, total = torch.cuda.mem_get_info(self._device)
        margin = round(total * (1.0 - self._utilization))
        return Room(torch.cuda.get_device_name(self._device), total, free, margin, "gpu_memory_utilization")

    def need_of(self, work: Callable[[], object]) -> int:
        """See `DeviceMemory.need_of`: the allocator's peak, and what the driver took beside it."""
        _give_back()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        held, free = torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]
        work()
        torch.cuda.synchronize(self._device)
        grown = torch.cuda.memory_reserved(self._device) - held
        beside = free - torch.cuda.mem_get_info(self._device)[0] - grown
        return int(torch.cuda.max_memory_reserved(self._device) - held + max(beside, 0))


class HostMemory:
    """Memory of the machine, or of the group of processes that this one is confined to."""

    measures = False

    def room(self) -> Room:
        """See `DeviceMemory.room`."""
        total, free = _host_bytes()
        return Room("this machine", total, free, round(free * _HOST_MARGIN_SHARE))

    def need_of(self, work: Callable[[], object]) -> int:
        """Nothing is measured: pages of a host are given back as they come."""
        work()
        return 0


def memory_of(device: torch.device, config: Config) -> DeviceMemory:
    """The memory that an engine on a device uses."""
    if device.type == "cpu":
        return HostMemory()
    return AcceleratorMemory(device, config.gpu_memory_utilization)


def _give_back() -> None:
    """Return to the driver what the allocator keeps for later."""
    gc.collect()
    torch.cuda.empty_cache()


def _host_bytes() -> tuple[int, int]:
    """Total and available memory of this process's surroundings."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo("MemAvailable") or page * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None and limit < total:
        # Files that were read count as used, a checkpoint's above all, and give way to whoever asks.
        cached = sum(_lines_of(_CGROUP / "memory.stat").get(name, 0) for name in ("active_file", "inactive_file"))
        total, free = limit, min(free, max(limit - used + cached, 0))
    return total, free


def _meminfo(name: str) -> int | None:
    """A line of the kernel's account of memory, which counts what it can drop as available; None without one."""
    kib = _lines_of(Path("/proc/meminfo")).get(f"{name}:")
    return None if kib is None else kib * 1024


def _lines_of(file: Path) -> dict[str, int]:
    """The first word of each line with the number behind it; nothing where there is no file."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[1].isdecimal()}


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no file, or a word."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
