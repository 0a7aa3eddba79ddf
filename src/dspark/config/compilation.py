"""How a step is run on the device: eagerly, or as captured graphs."""

from dataclasses import dataclass
from enum import Enum

from dspark.config.checks import require_int
from dspark.config.errors import ConfigError

MAX_COMPILATION_LEVEL = 3


class CUDAGraphMode(Enum):
    """Which passes are captured, and how.

    FULL captures passes over short spans whole; PIECEWISE captures passes over any spans in pieces, between which
    attention runs op by op; FULL_AND_PIECEWISE takes the first where it can and the second for the rest.
    """

    AUTO = "auto"
    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_AND_PIECEWISE = "full_and_piecewise"

    @property
    def captures_passes(self) -> bool:
        """Whether passes over short spans are one graph."""
        return self in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE)

    @property
    def captures_pieces(self) -> bool:
        """Whether other passes are launched in pieces."""
        return self in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE)


@dataclass(frozen=True)
class CompilationConfig:
    """Compilation and graph capture.

    Args:
        level: 0 runs the modules as they are; higher levels ask for a compiler (see admission).
        cudagraph_mode: which steps are launched as captured graphs; a member or its name. Auto is full where the device
            captures graphs and eager is not enforced, else none.
        cudagraph_capture_sizes: row counts to capture, ascending; empty lets the engine choose.
    """

    level: int = 0
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.AUTO
    cudagraph_capture_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_int("compilation level", self.level, low=0, high=MAX_COMPILATION_LEVEL)
        object.__setattr__(self, "cudagraph_mode", _as_mode(self.cudagraph_mode))
        sizes = self.cudagraph_capture_sizes
        if not isinstance(sizes, tuple | list):
            raise ConfigError(f"cudagraph_capture_sizes must be a list of row counts, not {sizes!r}")
        sizes = tuple(sizes)
        for size in sizes:
            require_int("cudagraph_capture_sizes", size, low=1)
        if list(sizes) != sorted(set(sizes)):
            raise ConfigError(f"cudagraph_capture_sizes must ascend without repeats, not {sizes}")
        object.__setattr__(self, "cudagraph_capture_sizes", sizes)


def _as_mode(mode: object) -> CUDAGraphMode:
    if isinstance(mode, CUDAGraphMode):
        return mode
    names = {member.value: member for member in CUDAGraphMode}
    if isinstance(mode, str) and mode.lower() in names:
        return names[mode.lower()]
    raise ConfigError(f"cudagraph_mode must be one of {', '.join(names)}, not {mode!r}")
