"""Kernels that are launched while the kernel before them is still finishing, where the device can do it.

Launched with `launch_pdl=early_launch()`, a kernel need not wait until the previous one has drained: its programs call
`begin` before they read or write anything, and that waits. Hides a microsecond of every launch and changes no value.
The next kernel is not called in any earlier than that: programs that come while others still run are not spread
evenly over the device, which costs more than it hides.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dspark.ops.triton.launch import INTERPRETED


@lru_cache(maxsize=1)
def early_launch() -> bool:
    """Whether this process's GPU is of the Hopper kind, on which starting dependent kernels early was measured."""
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait for the kernels before this one."""
    if EARLY:
        gdc_wait()
