"""What every launch shares: inputs that lie in one fixed way, block sizes, and outputs that can be rounded."""

import torch
import triton
from torch import Tensor

# Interpreted kernels run on CPU tensors; their stores to narrower floats truncate, so results are rounded after.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
_ALIGNMENT_BYTES = 16


def packed(x: Tensor) -> Tensor:
    """The same values, contiguous and aligned, so that a kernel seldom has a second layout to be compiled for.

    Whole numbers are left where they are: kernels read them one by one, and columns of a pass's positions and slots,
    which start anywhere, would be copied in every layer.
    """
    x = x.contiguous()
    return x if x.dtype == torch.int64 or x.data_ptr() % _ALIGNMENT_BYTES == 0 else x.clone()


def unbroken(rows: Tensor) -> Tensor:
    """The same values, neighbours in the last dimension side by side; rows may lie at any distance, or be one."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def new_output(like: Tensor, *shape: int) -> Tensor:
    """An output tensor of a kernel for values of the dtype of `like`; pass what was written through `rounded`."""
    return like.new_empty(shape, dtype=torch.float32 if INTERPRETED else like.dtype)


def rounded(written: Tensor, like: Tensor) -> Tensor:
    """What a kernel wrote, in the dtype of `like`."""
    return written if written.dtype == like.dtype else written.to(like.dtype)


def block_of(size: int, least: int = 1) -> int:
    """The power of two that covers `size` elements."""
    return max(triton.next_power_of_2(size), least)


def warps_of(block: int) -> int:
    """Warps for a program that reduces `block` elements."""
    return 1 if block <= 512 else 4 if block <= 4096 else 8
