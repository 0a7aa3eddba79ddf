"""Rows of logits to tokens: the argmax of what the filters leave plus the temperature times keyed noise.

Adding T times Gumbel noise to logits draws from softmax(logits / T), needs no maximum of the row first, stays finite
for any temperature, and is the plain argmax at temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.ops.filters import filter_logits
from dspark.ops.noise import gumbel_noise, signed_64

NUM_WORDS = 6


class DrawKind(IntEnum):
    """How much work the draws of a call need at most; a larger kind gives the rows of a smaller one the same tokens."""

    GREEDY = 0  # the argmax
    SAMPLED = 1  # a temperature
    FILTERED = 2  # and min-p, top-k or top-p

    @classmethod
    def of(cls, params: SamplingParams) -> DrawKind:
        """The kind of one request."""
        if params.is_greedy:
            return cls.GREEDY
        filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        return cls.FILTERED if filters else cls.SAMPLED


@dataclass(frozen=True, slots=True)
class DrawParams:
    """What draws of N requests depend on besides logits and positions, as one tensor.

    Attributes:
        words: [N, 6] int64: seed, noise stream, top-k (0 is off), then the bits of float64 numbers: temperature, top-p
            (1 is off), logarithm of min-p (-inf is off).
    """

    words: Tensor

    @classmethod
    def pack(cls, params: Sequence[SamplingParams], streams: Sequence[int] | None = None) -> DrawParams:
        """The parameters of requests, on the CPU; the stream is that of the target by default."""
        integers = [
            [signed_64(one.seed), stream, one.top_k]
            for one, stream in zip(params, streams or [0] * len(params), strict=True)
        ]
        reals = torch.tensor([[one.temperature, one.top_p, one.min_p] for one in params], dtype=torch.float64)
        reals = reals.view(-1, 3)
        reals[:, 2].log_()
        integral = torch.tensor(integers, dtype=torch.int64).view(-1, 3)
        return cls(torch.cat((integral, reals.view(torch.int64)), dim=1))

    def of_rows(self, owners: Tensor) -> DrawParams:
        """The parameters of rows that belong to requests `owners` [T]; -1 is a row of padding."""
        return DrawParams(self.words[owners.clamp(min=0)])

    @property
    def seeds(self) -> Tensor:
        """[N] int64."""
        return self.words[:, 0]

    @property
    def streams(self) -> Tensor:
        """[N] int64, see `dspark.ops.noise.Stream`."""
        return self.words[:, 1]

    @property
    def top_k(self) -> Tensor:
        """[N] int64."""
        return self.words[:, 2]

    @property
    def temperature(self) -> Tensor:
        """[N] float32."""
        return self._real(3).to(torch.float32)

    @property
    def top_p(self) -> Tensor:
        """[N] float64."""
        return self._real(4)

    @property
    def log_min_p(self) -> Tensor:
        """[N] float32."""
        return self._real(5).to(torch.float32)

    def _real(self, column: int) -> Tensor:
        return self.words.view(torch.float64)[:, column]


def filtered(logits: Tensor, params: DrawParams) -> Tensor:
    """Logits over the temperature after all filters, see `dspark.ops.filters.filter_logits`; a row a request."""
    return filter_logits(logits, params.temperature, params.log_min_p, params.top_k, params.top_p)


def best_tokens(logits: Tensor) -> Tensor:
    """The largest logit's id of each row [T, V]: [T] int64; ties go to the lower id."""
    return logits.argmax(-1)


def draw_rows(logits: Tensor, owners: Tensor, positions: Tensor, params: DrawParams, kind: DrawKind) -> Tensor:
    """One token a row; ties go to the lower id.

    Args:
        logits: [T, V], any float type, rows of V numbers that follow each other; every row has a finite one.
        owners: [T] int64, the request of each row, or -1 for padding, whose token means nothing.
        positions: [T] int64, of the token that the row draws.
        params: of the requests.
        kind: the largest kind among them.
    Returns:
        [T] int64.
    """
    if kind is DrawKind.GREEDY:
        return best_tokens(logits)
    rows = params.of_rows(owners)
    logits = logits.to(torch.float32)
    noise = gumbel_noise(rows.seeds, positions, logits.shape[1], streams=rows.streams)
    noisy = logits + rows.temperature[:, None] * noise
    if kind is DrawKind.FILTERED:
        noisy = noisy.masked_fill(filtered(logits, rows) == -torch.inf, -torch.inf)
    return noisy.argmax(-1)
