"""What rank 0 decides, as every rank takes it."""

import torch
from torch import Tensor

from dspark.parallel.group import RankGroup


def decided(ranks: RankGroup, *values: Tensor) -> tuple[Tensor, ...]:
    """Rank 0's values in place of each rank's own: one exchange, or nothing where there is one rank.

    Args:
        values: of one integer dtype, of any shapes, the same on all ranks.
    Returns:
        as many contiguous tensors of the same shapes.
    """
    if ranks.size == 1:
        return values
    told = ranks.broadcast(torch.cat([value.reshape(-1) for value in values]))
    parts = told.split([value.numel() for value in values])
    return tuple(part.view(value.shape) for part, value in zip(parts, values, strict=True))
