"""The machine that a measurement was made on, as far as it matters for comparing figures."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from dspark.version import __version__


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Names and versions; nothing that identifies the machine itself."""
    machine = {
        "dspark": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": device.type,
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine


def processor(machine: dict[str, Any]) -> str:
    """What a described machine computes with."""
    return str(machine.get("gpu", machine["cpu"]))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
