"""The rows of one call as device tensors, so that a draw does no per-row Python work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.noise import LANE, Stream
from dspark.sampling.penalties import Adjustments
from dspark.sampling.rows import RowSampling


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The T rows of a batch in which some have a temperature above 0.

    Attributes:
        owners, positions: [T] int64; each row has parameters of its own.
        params: of the T rows.
        kind: what the draws of the batch need.
    """

    owners: Tensor
    positions: Tensor
    params: DrawParams
    kind: DrawKind

    @classmethod
    def build(cls, rows: Sequence[RowSampling], device: torch.device) -> SampledRows | None:
        """Pack the rows; None when all are greedy."""
        kind = max((DrawKind.of(row.params) for row in rows), default=DrawKind.GREEDY)
        if kind is DrawKind.GREEDY:
            return None
        params = DrawParams.pack([row.params for row in rows], [row.stream for row in rows])
        positions = torch.tensor([row.position for row in rows], dtype=torch.int64)
        owners = torch.arange(len(rows), device=device)
        return cls(owners, positions.to(device), DrawParams(params.words.to(device)), kind)

    def advance(self) -> SampledRows:
        """Move to the next position; a draft of the ratio test also moves to its next lane.

        The pair (position, lane) names the anchor, so the noise of a discarded draft never comes back in a later round.
        """
        words = self.params.words.clone()
        words[:, 1] += LANE * (words[:, 1] != Stream.TARGET)
        return replace(self, positions=self.positions + 1, params=DrawParams(words))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """T rows ready to be drawn.

    Attributes:
        sampled: how they are drawn, or None where all are greedy.
        adjustments: the rows with logit bias or penalties, or None.
    """

    sampled: SampledRows | None
    adjustments: Adjustments | None

    @classmethod
    def build(cls, rows: Sequence[RowSampling], vocab_size: int, device: torch.device | str = "cpu") -> SamplingBatch:
        """Pack rows for logits of `vocab_size` columns on `device`."""
        device = torch.device(device)
        return cls(SampledRows.build(rows, device), Adjustments.build(rows, vocab_size, device))

    def advance(self, token_ids: Tensor) -> SamplingBatch:
        """The batch that draws the next position of every row, after `token_ids` [T] were drawn."""
        sampled = self.sampled.advance() if self.sampled else None
        adjustments = self.adjustments.advance(token_ids) if self.adjustments else None
        return SamplingBatch(sampled, adjustments)
