"""From a proposal to what waits for verification: how much of each block is worth a row."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.engine.request import PendingDraft
from dspark.engine.speculation import Speculation
from dspark.speculative.proposer import Proposal
from dspark.speculative.survival import compute_survival


def pending_drafts(proposal: Proposal, nums_left: Sequence[int], speculation: Speculation) -> list[PendingDraft]:
    """Blocks with their verify lengths.

    Args:
        proposal: of R requests.
        nums_left: [R] tokens that each request may still emit; the bonus is one of them.
        speculation: chooses lengths.
    """
    limits = [min(num_left - 1, proposal.width) for num_left in nums_left]
    lengths = speculation.lengths.choose(_survival(proposal, speculation), limits)
    probabilities, confidence = proposal.draft_probabilities, proposal.confidence_logits
    return [
        PendingDraft(
            token_ids,
            None if probabilities is None else probabilities[number],
            lengths[number],
            None if confidence is None else confidence[number],
        )
        for number, token_ids in enumerate(proposal.token_ids.tolist())
    ]


def _survival(proposal: Proposal, speculation: Speculation) -> NDArray[np.float64]:
    """Survival [R, G]; policies that do not use confidence read the shape only."""
    if proposal.confidence_logits is None or not speculation.lengths.uses_confidence:
        return np.ones(tuple(proposal.token_ids.shape))
    return compute_survival(proposal.confidence_logits, speculation.temperatures)
