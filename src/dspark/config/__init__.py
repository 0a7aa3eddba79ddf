"""Frozen settings, every rule of admission, and the only reader of the environment; no torch here."""

from dspark.config.admission import Admission, admit
from dspark.config.compilation import CompilationConfig, CUDAGraphMode
from dspark.config.engine import Config
from dspark.config.environment import Environment, read_environment
from dspark.config.errors import CheckpointError, ConfigError, DSparkError
from dspark.config.facts import EngineFacts, HardwareFacts, ModelFacts, ShardedDimension
from dspark.config.sampling import SamplingParams
from dspark.config.speculative import DSparkConfig, SpeculativeConfig

__all__ = [
    "Admission",
    "CUDAGraphMode",
    "CheckpointError",
    "CompilationConfig",
    "Config",
    "ConfigError",
    "DSparkConfig",
    "DSparkError",
    "EngineFacts",
    "Environment",
    "HardwareFacts",
    "ModelFacts",
    "SamplingParams",
    "ShardedDimension",
    "SpeculativeConfig",
    "admit",
    "read_environment",
]
