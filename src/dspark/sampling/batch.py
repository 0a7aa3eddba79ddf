"""The rows of one call as device tensors, so that a draw does no per-row Python work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.sampling.noise import LANE, Stream, seeds_tensor
from dspark.sampling.penalties import Adjustments
from dspark.sampling.rows import RowSampling


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The N rows of a batch that have a temperature above 0.

    Attributes:
        index: [N] int64, their places in the batch.
        seeds, positions, streams: [N] int64, key of the noise.
        temperature: [N, 1] float32.
        log_min_p: [N, 1] float32, -inf where off.
        top_k: [N] int64, 0 where off.
        top_p: [N] float64, 1 where off.
        has_min_p, has_top: whether any row uses min-p; top-k or top-p.
    """

    index: Tensor
    seeds: Tensor
    positions: Tensor
    streams: Tensor
    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    has_min_p: bool
    has_top: bool

    @classmethod
    def build(cls, rows: Sequence[RowSampling], device: torch.device) -> SampledRows | None:
        """Collect the sampled rows; None when all are greedy."""
        chosen = [(i, row) for i, row in enumerate(rows) if not row.params.is_greedy]
        if not chosen:
            return None
        params = [row.params for _, row in chosen]
        integers = torch.tensor(
            [[i, row.position, row.stream, row.params.top_k] for i, row in chosen], dtype=torch.int64
        ).to(device)
        reals = torch.tensor([[one.temperature, one.min_p, one.top_p] for one in params], dtype=torch.float64).to(
            device
        )
        return cls(
            index=integers[:, 0],
            seeds=seeds_tensor((one.seed for one in params), device),
            positions=integers[:, 1],
            streams=integers[:, 2],
            temperature=reals[:, 0:1].to(torch.float32),
            log_min_p=reals[:, 1:2].log().to(torch.float32),
            top_k=integers[:, 3],
            top_p=reals[:, 2],
            has_min_p=any(one.min_p > 0.0 for one in params),
            has_top=any(one.top_k > 0 or one.top_p < 1.0 for one in params),
        )

    def advance(self) -> SampledRows:
        """Move to the next position; a draft of the ratio test also moves to its next lane.

        The pair (position, lane) names the anchor, so the noise of a discarded draft never comes back in a later round.
        """
        streams = self.streams + LANE * (self.streams != Stream.TARGET)
        return replace(self, positions=self.positions + 1, streams=streams)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """T rows ready to be drawn.

    Attributes:
        num_rows: T.
        sampled: the rows with a temperature, or None.
        adjustments: the rows with logit bias or penalties, or None.
    """

    num_rows: int
    sampled: SampledRows | None
    adjustments: Adjustments | None

    @classmethod
    def build(cls, rows: Sequence[RowSampling], vocab_size: int, device: torch.device | str = "cpu") -> SamplingBatch:
        """Pack rows for logits of `vocab_size` columns on `device`."""
        device = torch.device(device)
        sampled = SampledRows.build(rows, device)
        return cls(len(rows), sampled, Adjustments.build(rows, vocab_size, device))

    @property
    def is_plain_greedy(self) -> bool:
        """Whether every row is the argmax of its raw logits."""
        return self.sampled is None and self.adjustments is None

    def advance(self, token_ids: Tensor) -> SamplingBatch:
        """The batch that draws the next position of every row, after `token_ids` [T] were drawn."""
        sampled = self.sampled.advance() if self.sampled else None
        adjustments = self.adjustments.advance(token_ids) if self.adjustments else None
        return SamplingBatch(self.num_rows, sampled, adjustments)
