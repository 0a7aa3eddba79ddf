"""Fake quantisation of activations and cached rows: to fp8 or fp4 and back, in groups along the last dimension.

Scales follow the reference bit for bit: powers of two rounded up (ue8m0), or e4m3 for compressed rows.
"""

import torch
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0
_FP8_STEP = torch.tensor(1.0 / FP8_MAX, dtype=torch.float32).item()
_FP4_STEP = torch.tensor(1.0 / FP4_MAX, dtype=torch.float32).item()


def power_of_two_ceiling(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal float32; computed on the bits, so exact.

    Adding the mantissa mask carries into the exponent unless the mantissa is zero. Example: 0.75 has exponent
    -1 and a non-zero mantissa -> 1.0; 0.5 stays 0.5.
    """
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def quantise_fp8(x: Tensor, group: int) -> Tensor:
    """fp8 e4m3 and back; scale = 2^ceil(log2(max(amax, 1e-4) / 448)) per `group` elements of the last dimension.

    Args:
        x: [..., D], D a multiple of `group`.
    Returns:
        [..., D] in the dtype of `x`, every value on the scaled e4m3 grid.
    """
    groups = x.float().reshape(-1, group)
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=1e-4)
    scale = power_of_two_ceiling(amax.mul_(_FP8_STEP))
    # The scaled amax exceeds 448 by a rounding at most, and everything below 464 rounds to 448: no clamp is needed.
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return codes.float().mul_(scale).view(x.shape).to(x.dtype)


def round_to_fp4(x: Tensor) -> Tensor:
    """Nearest e2m1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6 with sign), ties to the even code; |x| <= 6."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.round(x / step) * step


def quantise_fp4(x: Tensor, group: int) -> Tensor:
    """fp4 e2m1 and back; scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) per `group` elements."""
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=FP4_MAX * 2.0**-126)
    scale = power_of_two_ceiling(amax.mul_(_FP4_STEP))
    codes = round_to_fp4((groups / scale).clamp_(-FP4_MAX, FP4_MAX))
    return (codes * scale).flatten(-2).to(x.dtype)


def quantise_fp4_e4m3(x: Tensor, group: int) -> Tensor:
    """fp4 e2m1 and back with an e4m3 scale e4m3(max(amax, 6 * 2^-9) / 6) per `group` elements."""
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=FP4_MAX * 2.0**-9)
    scale = (amax / FP4_MAX).clamp_(max=FP8_MAX).to(torch.float8_e4m3fn).float()
    codes = round_to_fp4((groups / scale).clamp_(-FP4_MAX, FP4_MAX))
    return (codes * scale).flatten(-2).to(x.dtype)
