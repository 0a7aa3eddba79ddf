"""Calibration profiles written by hand, for tests of what reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IDENTITY: dict[str, Any] = {
    "model_files": {"config.json": "a" * 64, "model.safetensors.index.json": "b" * 64},
    "model_type": "a family",
    "tensor_parallel_size": 1,
    "kv_cache_dtype": "bf16",
    "index_cache_dtype": "fp8",
    "expert_backend": "torch",
    "graph": "none",
    "gpu_name": None,
    "torch_version": "2.11.0",
    "hip_version": None,
    "cuda_version": None,
    "engine_version": "1",
}


def profile_fields(width: int = 3, batch_size: int = 2, identity: Mapping[str, Any] = IDENTITY) -> dict[str, Any]:
    """A profile that fits: every row costs a little more than the one before."""
    rows = batch_size * (width + 1)
    return {
        "version": 1,
        "identity": dict(identity),
        "draft_width": width,
        "max_num_seqs": batch_size,
        "sps_table": [100.0 / (10 + count) for count in range(rows + 1)],
        "sts_temperatures": [1.0 + 0.1 * k for k in range(width)],
        "evidence": {},
    }


def write_profile(path: Path, fields: Any) -> Path:
    """Write fields as JSON; numbers that are not finite become the words that Python's reader takes."""
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path
