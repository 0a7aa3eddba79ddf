"""The sum of parts that several ranks computed."""

from torch import Tensor


def sum_parts(parts: Tensor) -> Tensor:
    """Sum over the first dimension, from first to last in float32, rounded once.

    Args:
        parts: [n, ...], any float dtype.
    Returns:
        [...] in the dtype of `parts`.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)
