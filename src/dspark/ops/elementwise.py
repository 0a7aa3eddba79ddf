"""Activations built from operations whose bits do not depend on an element's place in the tensor.

The library's own sigmoid, silu and softplus compute the last few elements of a buffer with scalar code that
rounds differently from the vector code before them, so a row would change with the number of rows beside it.
exp, log1p, sqrt and the four basic operations do not have this tail.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function 1 / (1 + exp(-x)), any shape."""
    return (1.0 + torch.exp(-x)).reciprocal()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), any shape."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow: max(x, 0) + log1p(exp(-|x|)), any shape."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
