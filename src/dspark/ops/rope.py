"""Rotary position embedding of the last elements of a head, on adjacent pairs (2i, 2i+1)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class YarnPlan:
    """Frequency blending of YaRN; no attention factor. Lengths in tokens."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int


def rope_frequencies(rope_dim: int, base: float, yarn: YarnPlan | None) -> Tensor:
    """Angular frequencies [rope_dim / 2] in radians per token, float32.

    With YaRN, frequencies that turn fewer than `beta_slow` times within the original length are divided by
    `factor`, those above `beta_fast` stay, and a linear ramp blends between; its bounds are clamped to
    [0, rope_dim - 1].
    """
    freqs = 1.0 / (base ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))
    if yarn is None:
        return freqs

    def turning_point(rotations: float) -> float:
        return rope_dim * math.log(yarn.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turning_point(yarn.beta_fast)), 0)
    high = min(math.ceil(turning_point(yarn.beta_slow)), rope_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return freqs / yarn.factor * (1 - keep) + freqs * keep


def rotations(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rope_dim / 2] of positions [T] (int64)."""
    angles = positions.float().unsqueeze(-1) * freqs
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 2 * cos.shape[-1] elements of x [T, K] or [T, H, K]; the rest passes through.

    Pass `-sin` for the inverse rotation.
    """
    rope_dim = 2 * cos.shape[-1]
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    head, tail = x[..., :-rope_dim], x[..., -rope_dim:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), dim=-1)
