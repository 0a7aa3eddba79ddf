"""The most memory that a piece of work held: on the device where there is one, else of this process."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# The value that resets the high-water mark of resident memory (man 5 proc).
_RESET_PEAK = "5"


@dataclass
class PeakMemory:
    """Filled in when the measured block ends.

    Args:
        peak_bytes: highest resident or allocated bytes.
        is_exact: False where the system cannot reset its mark, so that earlier work is included.
    """

    peak_bytes: int = 0
    is_exact: bool = True


@contextmanager
def measure_peak(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the peak of the enclosed work. Weights that are loaded already count, as they are held meanwhile."""
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.peak_bytes = torch.cuda.max_memory_allocated(device)
        return
    peak.is_exact = _reset_process_peak()
    yield peak
    peak.peak_bytes = _process_peak_bytes()


def _reset_process_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _process_peak_bytes() -> int:
    """VmHWM follows the reset; getrusage, the fallback, never falls."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
