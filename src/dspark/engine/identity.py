"""What an engine is, as the fields that a calibration profile must agree with."""

from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint.folder import metadata_digests
from dspark.config import Config
from dspark.engine.device import graph_mode
from dspark.layers.plans import ModelPlan
from dspark.ops.opset import OpSet
from dspark.version import __version__

_CPU = torch.device("cpu")


def engine_identity(
    config: Config, plan: ModelPlan, folder: Path, ops: OpSet, device: torch.device = _CPU
) -> dict[str, Any]:
    """Identity fields of version 1; versions that do not apply to a CPU build of torch are None."""
    on_gpu = device.type == "cuda"
    return {
        "model_files": metadata_digests(folder),
        "model_type": plan.family,
        "tensor_parallel_size": config.tensor_parallel_size,
        "kv_cache_dtype": config.kv_cache_dtype,
        "index_cache_dtype": config.index_cache_dtype,
        "expert_backend": ops.name,
        "graph": graph_mode(config, device).value,
        "gpu_name": torch.cuda.get_device_name(device) if on_gpu else None,
        "torch_version": torch.__version__,
        "hip_version": torch.version.hip,
        "cuda_version": torch.version.cuda,
        "engine_version": __version__,
    }
