"""What one engine step runs: for each request the known tokens to write and the drafts to verify."""

from collections.abc import Hashable
from dataclasses import dataclass

RequestId = Hashable


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """Rows of one request in a step.

    Attributes:
        request_id: key.
        num_known: known tokens whose rows are written: a prefill or replay chunk, or 1 for the anchor alone.
        verify_len: drafts that follow; more than 0 only when the known rows end at the anchor.
    """

    request_id: RequestId
    num_known: int
    verify_len: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the target pass."""
        return self.num_known + self.verify_len


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Spans of one target pass, in batch order."""

    spans: tuple[PlannedSpan, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the whole pass."""
        return sum(span.num_rows for span in self.spans)


@dataclass(frozen=True, slots=True)
class RequestNeeds:
    """What a scheduler must know of a request.

    Attributes:
        request_id: key.
        num_pending: known tokens without a row, the anchor included; 1 while decoding.
        verify_len: drafts that are ready and worth verifying.
        max_len: most tokens that it can ever hold, prompt and output together.
        committed: tokens with a final row.
        num_pages: pages that it holds.
        max_chunk: known tokens that a step may write at most, so that a chunk ends where an image is wanted; None for
            no limit.
    """

    request_id: RequestId
    num_pending: int
    verify_len: int
    max_len: int
    committed: int = 0
    num_pages: int = 0
    max_chunk: int | None = None
