"""Orthonormal Hadamard transform in Sylvester order."""

import torch
from torch import Tensor


def hadamard_matrix(size: int) -> Tensor:
    """[size, size] float32, entries +-size^-0.5; size is a power of two."""
    if size & (size - 1):
        raise ValueError(f"a Hadamard transform needs a power of two, not {size}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix * size**-0.5
