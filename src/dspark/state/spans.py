"""Row arithmetic of one ragged pass: which row belongs to which request and where its neighbours lie.

Example: request A writes 3 rows from position 10, request B 2 rows from position 7. The pass has T = 5 rows at
positions 10 11 12 7 8; B's rows start at offset 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dspark.state.model_state import RequestState


@dataclass(frozen=True)
class Span:
    """Rows of one request at consecutive positions start, start + 1, ..., stop - 1."""

    request: RequestState
    start: int
    num_rows: int

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows


def next_span(request: RequestState, num_rows: int) -> Span:
    """The span that follows a request's committed rows."""
    return Span(request, request.committed, num_rows)


def row_positions(spans: Sequence[Span]) -> list[int]:
    """Position of every row, spans one after the other."""
    return [position for span in spans for position in range(span.start, span.stop)]


def row_slots(spans: Sequence[Span]) -> list[int]:
    """Slot of every row's request."""
    return [span.request.slot for span in spans for _ in range(span.num_rows)]


def row_owners(spans: Sequence[Span]) -> list[int]:
    """Number of every row's span."""
    return [number for number, span in enumerate(spans) for _ in range(span.num_rows)]


def page_table(pages: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pages of several requests as rows of one length; what stands behind a request's own pages is not read."""
    longest = max(map(len, pages))
    return [[*own, *[0] * (longest - len(own))] for own in pages]


class RowMap:
    """Tensors that address the rows of a pass; `num_padding` inert rows may follow the real ones."""

    def __init__(self, spans: list[Span], num_padding: int, device: torch.device) -> None:
        self.spans = spans
        self.device = device
        self.num_padding = num_padding
        *self.offsets, self.num_rows = accumulate((span.num_rows for span in spans), initial=0)
        self.positions = self._tensor(row_positions(spans) + [0] * num_padding)
        self.owners = self._tensor(row_owners(spans) + [max(len(spans) - 1, 0)] * num_padding)
        self.starts = self._tensor([span.start for span in spans])
        self.offset_of = self._tensor(self.offsets)
        self.slots = self._tensor([span.request.slot for span in spans])
        self.is_padding = torch.arange(self.num_rows + num_padding, device=device) >= self.num_rows

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def locate(self, owners: Tensor, positions: Tensor, ring_rows: int, num_slots: int | None = None) -> Tensor:
        """Where a token's row lies in [rings of the pass's requests, rows of the pass].

        The ring part has len(spans) * ring_rows rows. Example: with 133 ring rows, request 1 and start 200, position
        199 is ring row 133 + 199 % 133 = 199; position 201 is fresh, at 2 * 133 + offset + 1.

        Args:
            owners, positions: int64 of one shape; a negative position is no token.
            num_slots: slots of the store; with it the place is in [all rings of the store, rows of the pass].
        Returns:
            the same shape, -1 where there is no token.
        """
        first = self.starts[owners]
        num_rings, rings = (len(self.spans), owners) if num_slots is None else (num_slots, self.slots[owners])
        fresh = num_rings * ring_rows + self.offset_of[owners] + positions - first
        kept = rings * ring_rows + positions % ring_rows
        return torch.where(positions < 0, -1, torch.where(positions >= first, fresh, kept))

    def ring_writes(self, ring_rows: int) -> tuple[Tensor, Tensor]:
        """Rows of the pass to keep and their places in a flattened store [slots * ring_rows].

        A span longer than the ring keeps its last rows only, so no place is written twice.
        """
        rows: list[int] = []
        places: list[int] = []
        for offset, span in zip(self.offsets, self.spans, strict=True):
            first = max(span.start, span.stop - ring_rows)
            rows.extend(range(offset + first - span.start, offset + span.num_rows))
            base = span.request.slot * ring_rows
            places.extend(base + position % ring_rows for position in range(first, span.stop))
        return self._tensor(rows), self._tensor(places)
