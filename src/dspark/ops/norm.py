"""Root-mean-square normalisation."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32.

    Args:
        x: [..., D].
        weight: [D] or None for the weightless form (query heads of some models).
        eps: added to the mean square.
    Returns:
        [..., D] in the dtype of `x`.
    """
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide if weight is None else wide * weight).to(x.dtype)
