"""Where a model runs: the device, the op twins that belong to it, and the type of its activations."""

import importlib.util
from dataclasses import dataclass

import torch

from dspark.config import Config, CUDAGraphMode, EngineFacts, HardwareFacts
from dspark.ops.library import with_library_products
from dspark.ops.opset import OpSet, ops_for

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Placement:
    """Device, twins and activations of one engine."""

    device: torch.device
    ops: OpSet
    dtype: torch.dtype


def place(config: Config) -> Placement:
    """The placement of an admitted configuration: an accelerator where one is visible and not declined."""
    kind = _kind_of(config)
    dtype = config.dtype if config.dtype != "auto" else "bf16" if kind == "cuda" else "fp32"
    device = torch.device(kind)
    ops = ops_for(device)
    if config.exactness == "fast":
        ops = with_library_products(ops)
    return Placement(device, ops, TORCH_DTYPES[dtype])


def graph_mode(config: Config, device: torch.device) -> CUDAGraphMode:
    """What an admitted configuration captures on a device."""
    mode = config.compilation_config.cudagraph_mode
    if mode is not CUDAGraphMode.AUTO:
        return mode
    return CUDAGraphMode.FULL if device.type == "cuda" and not config.enforce_eager else CUDAGraphMode.NONE


def engine_facts() -> EngineFacts:
    """The engine of this package, on the CPU or on an accelerator that Triton compiles for."""
    if _has_triton():
        return EngineFacts("this engine", devices=("cpu", "cuda"))
    idle = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return EngineFacts("the CPU engine", idle_devices=idle)


def hardware_facts() -> HardwareFacts:
    """The devices that this process sees."""
    if not torch.cuda.is_available():
        return HardwareFacts()
    return HardwareFacts("cuda", torch.cuda.device_count(), has_graphs=True)


def _kind_of(config: Config) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() and _has_triton() else "cpu"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
