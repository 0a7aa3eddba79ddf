"""dspark: an inference engine for DeepSeek-V4.1 and DeepSeek-V4-Flash with native DSpark speculative decoding.

Importing this package loads no torch: the engine's names are resolved when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dspark.config import (
    CompilationConfig,
    Config,
    CUDAGraphMode,
    DraftHealthConfig,
    DSparkConfig,
    DSparkError,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutput,
)
from dspark.version import __version__

if TYPE_CHECKING:
    from dspark.engine import LLM
    from dspark.engine.async_engine import AsyncEngine

__all__ = [
    "LLM",
    "AsyncEngine",
    "CUDAGraphMode",
    "CompilationConfig",
    "Config",
    "DSparkConfig",
    "DSparkError",
    "DraftHealthConfig",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutput",
    "__version__",
]

_LAZY = {"LLM": "dspark.engine", "AsyncEngine": "dspark.engine.async_engine"}


def __getattr__(name: str) -> Any:
    """Resolve the names whose modules need torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
