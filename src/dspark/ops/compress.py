"""Pooling of a group of token rows into one compressed row."""

import torch
from torch import Tensor


def pool_groups(values: Tensor, gates: Tensor) -> Tensor:
    """Per-channel softmax of the gates over a group's rows, applied to the values, in float32.

    Args:
        values: [C, M, K]. gates: [C, M, K]; -inf removes a row (the missing predecessor of a first group).
    Returns:
        [C, K] float32.
    """
    weights = torch.exp(gates - gates.amax(1, keepdim=True))
    return (values * (weights / weights.sum(1, keepdim=True))).sum(1)
