"""Passes that every rank runs, described by plain values.

A follower has the runners of an engine and no request: slots, pages, positions and tokens arrive with each call, in
copies of the spans that rank 0 plans. Rank 0 runs the same functions on its own part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.engine.pass_graphs import DraftGraphs
from dspark.engine.ranks.part import RankPart
from dspark.engine.runner import DraftRunner, PassOutput, SpanTokens, TargetRunner
from dspark.scheduler.plan import RequestId
from dspark.speculative.dspark import DraftBlock
from dspark.state.model_state import RequestState
from dspark.state.spans import Span


@dataclass(frozen=True)
class Anchor:
    """What a draft block must know of its request: its place among the blocks, and the token it starts from."""

    request_id: RequestId
    anchor_id: int


def run_target(part: RankPart, spans: Sequence[SpanTokens], num_padding: int) -> PassOutput:
    """A target pass. The pages of its spans are reserved already, so that nobody takes one here."""
    assert part.target is not None
    output = TargetRunner.forward(part.target, spans, num_padding)
    part.target_hidden, part.span_rows = output.target_hidden, [len(span.token_ids) for span in spans]
    return output


def absorb(part: RankPart, committed: Sequence[tuple[RequestState, int]]) -> None:
    """Keep the draft's window rows of the rows that the last target pass has made final: the first of each span."""
    assert part.draft is not None and part.target_hidden is not None
    spans = zip(part.target_hidden[: sum(part.span_rows)].split(part.span_rows), committed, strict=True)
    hidden = torch.cat([rows[:count] for rows, (_, count) in spans])
    DraftRunner.absorb(part.draft, committed, hidden)


def draft_block(part: RankPart, states: Sequence[RequestState], anchors: Sequence[int]) -> DraftBlock:
    """Base logits and hidden rows of draft blocks."""
    assert part.draft is not None
    own = part.draft.states
    part.draft.states = dict(enumerate(states))
    try:
        # The runner reads nothing else of a request.
        return DraftRunner.draft_block(part.draft, cast(Any, [Anchor(*one) for one in enumerate(anchors)]))
    finally:
        part.draft.states = own


def drawn_blocks(
    part: RankPart,
    num_blocks: int,
    spans: Sequence[Span],
    anchors: Sequence[int],
    params: Sequence[SamplingParams],
) -> tuple[Tensor, Tensor]:
    """Blocks that draw their own tokens, which come out the same on every rank."""
    assert part.draft is not None and part.draft.graphs is not None
    return DraftGraphs.drawn_blocks(part.draft.graphs, num_blocks, spans, anchors, params)
