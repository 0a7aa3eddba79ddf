"""What a measurement sees of a running engine: every round that was decided, with what had been proposed."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dspark.engine.request import Request
from dspark.scheduler.plan import RequestId


@dataclass(frozen=True)
class RoundRecord:
    """One draft block of one request and the verdict on it.

    Attributes:
        request_id: key.
        anchor_position: absolute position of the anchor; draft position k is at anchor_position + k.
        draft_ids: [G] the block as proposed; empty in a round without drafts.
        confidence_logits: [G] float32 before the sigmoid, or None from a drafter without a confidence head.
        verify_len: drafts that were verified.
        num_accepted: drafts that the target accepted, whether or not they were emitted.
        num_emitted: tokens that the round appended; less than num_accepted + 1 where a stop or a limit cut it.
    """

    request_id: RequestId
    anchor_position: int
    draft_ids: tuple[int, ...]
    confidence_logits: Tensor | None
    verify_len: int
    num_accepted: int
    num_emitted: int


class RoundObserver(Protocol):
    """Is told of rounds; must not change anything."""

    def observe(self, record: RoundRecord) -> None:
        """Called once for each request of a step that decided a round, after its tokens were appended."""
        ...


def record_round(request: Request, verify_len: int, num_accepted: int, num_emitted: int) -> RoundRecord:
    """The round whose tokens were just appended to a request, with the draft that it had."""
    draft = request.draft
    return RoundRecord(
        request_id=request.request_id,
        anchor_position=len(request.token_ids) - num_emitted - 1,
        draft_ids=tuple(draft.token_ids) if draft else (),
        confidence_logits=draft.confidence_logits if draft else None,
        verify_len=verify_len,
        num_accepted=num_accepted,
        num_emitted=num_emitted,
    )
