"""Rotary position embedding of the last elements of a head, on adjacent pairs (2i, 2i+1)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Turn = tuple[Tensor, Tensor]  # cos and sin of `rotations`


class TurnTable(NamedTuple):
    """The rotations that a pass reads: freqs [J, rope_dim / 2] float32, ratios [J] int64 of the groups, 1 for rows."""

    freqs: Tensor
    ratios: Tensor


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
    """Factors of a rotation: cos and signed sin, both [T, rope_dim], of positions [T] (int64).

    Pairs are adjacent, so each angle stands twice; the sine of an even place is negative. Example: with one
    frequency f, position p gives (cos pf, cos pf) and (-sin pf, sin pf).
    """
    angles = (positions.float().unsqueeze(-1) * freqs).repeat_interleave(2, dim=-1)
    sines = torch.sin(angles)
    sines[..., 0::2].neg_()
    return torch.cos(angles), sines


def row_rotations(positions: Tensor, table: TurnTable) -> list[Turn]:
    """`rotations` at the first positions of the groups that the rows at `positions` [T] lie in, for each of a table."""
    first = [positions - positions % ratio for ratio in table.ratios]
    return [rotations(places, freqs) for places, freqs in zip(first, table.freqs, strict=True)]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last cos.shape[-1] elements of x [T, K] or [T, H, K]; the rest passes through.

    An even element e with its odd neighbour o becomes e cos - o sin, and o becomes o cos + e sin: the tail times cos,
    plus the tail with neighbours swapped times the signed sine. Pass `-sin` for the inverse rotation.
    """
    rope_dim = cos.shape[-1]
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    head, tail = x.split((x.shape[-1] - rope_dim, rope_dim), dim=-1)
    tail = tail.float()
    swapped = tail.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat((head, (tail * cos + swapped * sin).to(x.dtype)), dim=-1)
