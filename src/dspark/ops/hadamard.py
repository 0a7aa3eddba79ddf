"""Orthonormal Hadamard transform in Sylvester order."""

import torch
from torch import Tensor


def hadamard(rows: Tensor) -> Tensor:
    """Transform of the last dimension: entries +-size^-0.5, in float32, rounded once.

    Each step adds and subtracts the elements that differ in the lowest bit of their place and makes that bit the
    highest; after as many steps as a place has bits, the places are in order again.

    Args:
        rows: [..., size], size a power of two.
    Returns:
        The same shape and dtype.
    Raises:
        ValueError: another size.
    """
    size = rows.shape[-1]
    if size & (size - 1):
        raise ValueError(f"a Hadamard transform needs a power of two, not {size}")
    wide = rows.float()
    for _ in range(size.bit_length() - 1):
        wide = torch.cat((wide[..., ::2] + wide[..., 1::2], wide[..., ::2] - wide[..., 1::2]), dim=-1)
    return (wide * size**-0.5).to(rows.dtype)
