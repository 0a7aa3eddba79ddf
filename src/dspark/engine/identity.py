"""What an engine is, as the fields that a calibration profile must agree with; and what this engine can do."""

from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint.folder import metadata_digests
from dspark.config import Config, EngineFacts
from dspark.layers.plans import ModelPlan
from dspark.ops.opset import OpSet
from dspark.version import __version__


def engine_facts() -> EngineFacts:
    """The engine of this package: one rank on the CPU, and the accelerators that it leaves idle."""
    return EngineFacts("the CPU engine", idle_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0)


def engine_identity(config: Config, plan: ModelPlan, folder: Path, ops: OpSet) -> dict[str, Any]:
    """Identity fields of version 1; versions that do not apply to a CPU build of torch are None."""
    return {
        "model_files": metadata_digests(folder),
        "model_type": plan.family,
        "tensor_parallel_size": config.tensor_parallel_size,
        "kv_cache_dtype": config.kv_cache_dtype,
        "index_cache_dtype": config.index_cache_dtype,
        "expert_backend": ops.name,
        "graph": config.compilation_config.cudagraph_mode.value,
        "gpu_name": None,
        "torch_version": torch.__version__,
        "hip_version": torch.version.hip,
        "cuda_version": torch.version.cuda,
        "engine_version": __version__,
    }
