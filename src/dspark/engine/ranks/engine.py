"""The engine of rank 0: its own, except that every pass and every copy of state is run by all ranks.

Requests, plans, draws and verdicts are rank 0's alone: followers learn rows, slots and pages, never why.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.engine.core import Engine
from dspark.engine.device_round import DeviceRounds
from dspark.engine.graphs import GraphPlan
from dspark.engine.loop import EngineLoop
from dspark.engine.pass_graphs import DraftGraphs
from dspark.engine.ranks import passes
from dspark.engine.ranks.part import RankPart
from dspark.engine.ranks.rounds import RankedRounds, make_rounds
from dspark.engine.ranks.share import Share
from dspark.engine.ranks.state import RankedState
from dspark.engine.request import Emission
from dspark.engine.runner import DraftRunner, PassOutput, SpanTokens, TargetRunner
from dspark.speculative.device_lengths import DeviceLengths
from dspark.speculative.dspark import DraftBlock
from dspark.speculative.proposer import ProposalRequest
from dspark.state.model_state import RequestState
from dspark.state.spans import Span


class RankedTarget(TargetRunner):
    """Target passes that all ranks run."""

    share: Share[RankPart]

    def forward(self, spans: Sequence[SpanTokens], num_padding: int = 0) -> PassOutput:
        """See `TargetRunner.forward`. Pages are taken here, so that the copies of the spans have them."""
        for span in spans:
            self.state.reserve(span.state, len(span.token_ids))
        num_rows = sum(len(span.token_ids) for span in spans)
        last = max(span.state.committed + len(span.token_ids) for span in spans)
        kind = (num_rows, last.bit_length(), num_padding)
        output: PassOutput = self.share.run(passes.run_target, spans, num_padding, kind=kind)
        return output


class RankedDraftGraphs(DraftGraphs):
    """Captured draft passes; blocks that draw their own tokens are launched by all ranks."""

    share: Share[RankPart]

    def drawn_blocks(
        self,
        num_blocks: int,
        spans: Sequence[Span],
        anchors: Sequence[int],
        params: Sequence[SamplingParams],
    ) -> tuple[Tensor, Tensor]:
        """See `DraftGraphs.drawn_blocks`."""
        kind = (num_blocks, all(one.is_greedy for one in params))
        args = (num_blocks, spans, anchors, params)
        drawn: tuple[Tensor, Tensor] = self.share.run(passes.drawn_blocks, *args, kind=kind)
        return drawn


class RankedDraft(DraftRunner):
    """Draft passes that all ranks run."""

    graphs_kind = RankedDraftGraphs
    share: Share[RankPart]

    def absorb(self, committed: Sequence[tuple[RequestState, int]], target_hidden: Tensor) -> None:
        """See `DraftRunner.absorb`; every rank takes the rows of its own last target pass."""
        self.share.run(passes.absorb, committed, kind=len(target_hidden))

    def draft_block(self, requests: Sequence[ProposalRequest]) -> DraftBlock:
        """See `DraftRunner.draft_block`."""
        states = [self.states[request.request_id] for request in requests]
        anchors = [request.anchor_id for request in requests]
        block: DraftBlock = self.share.run(passes.draft_block, states, anchors, kind=len(anchors))
        return block


class RankedEngine(Engine):
    """An engine whose passes are run by all ranks of a share."""

    def __init__(self, share: Share[RankPart], *args: Any, **kwargs: Any) -> None:
        self.share = share
        super().__init__(*args, **kwargs)
        assert isinstance(self.state, RankedState)
        self.state.share = share

    def _make_target(self) -> TargetRunner:
        target = RankedTarget(self.model, self.state, self.graphs, self.stopwatch)
        target.share, self.share.own.target = self.share, target
        return target

    def _make_draft(self, width: int) -> DraftRunner:
        draft = RankedDraft(self.model, self.state, width, self.graphs, self.num_valid_tokens, self.stopwatch)
        draft.share, self.share.own.draft = self.share, draft
        if isinstance(draft.graphs, RankedDraftGraphs):
            draft.graphs.share = self.share
        return draft

    def make_rounds(self, plan: GraphPlan, lengths: DeviceLengths) -> DeviceRounds:
        """See `Engine.make_rounds`."""
        self.share.tell(make_rounds, plan, self.speculation, lengths, self.num_valid_tokens)
        args = (plan, self.speculation, lengths, self.num_valid_tokens, self.stopwatch)
        rounds = RankedRounds(self.model, self.state, *args)
        rounds.share, self.share.own.rounds = self.share, rounds
        return rounds


class RankedLoop(EngineLoop):
    """The loop of a ranked engine: a step must get on, whatever it waits for."""

    engine: RankedEngine

    def step(self) -> list[Emission]:
        """See `EngineLoop.step`. Raises RankError when a rank has ended or stands still."""
        with self.engine.share.team.step():
            return super().step()
