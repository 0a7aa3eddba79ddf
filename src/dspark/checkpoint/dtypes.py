"""The dtypes that a safetensors header may name, and their torch counterparts."""

import math
from collections.abc import Sequence

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a named dtype."""
    return TORCH_DTYPES[dtype].itemsize


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Payload bytes of a tensor."""
    return element_bytes(dtype) * math.prod(shape)
