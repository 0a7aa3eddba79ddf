"""Frozen settings, every rule of admission, and the only reader of the environment; no torch here."""

from dspark.config.admission import Admission, admit
from dspark.config.compilation import CompilationConfig, CUDAGraphMode
from dspark.config.engine import Config
from dspark.config.environment import Environment, read_environment
from dspark.config.errors import CheckpointError, ConfigError, DSparkError
from dspark.config.facts import EngineFacts, HardwareFacts, ModelFacts, ShardedDimension
from dspark.config.sampling import SamplingParams
from dspark.config.speculative import DraftHealthConfig, DSparkConfig, SpeculativeConfig
from dspark.config.structured import StructuredOutput

__all__ = [
    "Admission",
    "CUDAGraphMode",
    "CheckpointError",
    "CompilationConfig",
    "Config",
    "ConfigError",
    "DSparkConfig",
    "DSparkError",
    "DraftHealthConfig",
    "EngineFacts",
    "Environment",
    "HardwareFacts",
    "ModelFacts",
    "SamplingParams",
    "ShardedDimension",
    "SpeculativeConfig",
    "StructuredOutput",
    "admit",
    "read_environment",
]
