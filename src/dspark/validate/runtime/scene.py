"""Requests with given tokens, played through target and draft passes in any company, at any place in the stores.

What a request writes, commits and drafts in each of its rounds follows from its number alone; who shares its passes,
which slot and pages it has and what lies beside them is the arrangement's. So rows of two arrangements can be compared.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.engine.graphs import GraphPlan
from dspark.engine.runner import DraftRunner, SpanTokens, TargetRunner
from dspark.models.build import Model
from dspark.sampling import RequestSampling
from dspark.speculative.proposer import ProposalRequest
from dspark.state.model_state import ModelState, RequestState

NUM_ROUNDS = 5
# Positions of the first rounds: fresh requests, and both sides of groups, pages and the window.
_FIRST = (1, 2, 3, 7, 62, 64, 66, 126, 131)

Rows = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Turn:
    """One round of a request: the rows that it writes, and how many of them it commits."""

    num_rows: int
    num_committed: int


@dataclass(frozen=True)
class Part:
    """A request of a scene: its tokens, the rows before its first round, and its rounds."""

    number: int
    token_ids: tuple[int, ...]
    first: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Arrangement:
    """How requests are played.

    Attributes:
        batches: numbers of the requests that share a pass in each round, in order.
        num_strangers: requests that hold slots and pages before these come, some of which leave again.
        before_pass: is called with the state before every pass.
        around_pass: the same, and what it returns is called after the target's pass.
    """

    batches: Callable[[int], Sequence[Sequence[int]]]
    num_strangers: int = 0
    before_pass: Callable[[ModelState], None] = lambda state: None
    around_pass: Callable[[ModelState, Sequence[SpanTokens]], Callable[[], None]] = lambda state, spans: lambda: None


@dataclass
class _Playing:
    """A request on its way."""

    part: Part
    state: RequestState
    rows: Rows = field(default_factory=list)


def make_parts(num_requests: int, num_tokens: int, max_query_len: int, max_len: int, seed: int) -> list[Part]:
    """Requests of random tokens below `num_tokens`; equal arguments give equal ones."""
    parts = []
    longest = max_len - NUM_ROUNDS * max_query_len - 1
    for number in range(num_requests):
        rng = random.Random(f"{seed}/{number}")
        first = min(_FIRST[number % len(_FIRST)] + number // len(_FIRST), longest)
        counts = [rng.choice([1, max_query_len, rng.randint(1, max_query_len)]) for _ in range(NUM_ROUNDS)]
        turns = tuple(Turn(count, rng.randint(1, count)) for count in counts)
        length = first + sum(counts) + 1
        parts.append(Part(number, tuple(rng.randrange(num_tokens) for _ in range(length)), first, turns))
    return parts


class Scene:
    """Runners over one state.

    Args:
        model, state: what runs, and where its requests lie.
        graphs: passes of fixed shape are launched as these say; None runs the ragged passes, op by op.
        block_size: draft tokens of a block, 0 without a draft.
    """

    def __init__(self, model: Model, state: ModelState, graphs: GraphPlan | None, block_size: int) -> None:
        self.state = state
        self._target = TargetRunner(model, state, graphs)
        self._draft = DraftRunner(model, state, block_size, graphs) if block_size else None

    def play(self, parts: Sequence[Part], arrangement: Arrangement) -> list[Rows]:
        """Logits, features and draft blocks of every round of every request; nothing stays."""
        strangers = list(self._strangers(arrangement.num_strangers))
        playing = [self._started(part) for part in parts]
        for turn in range(NUM_ROUNDS):
            for numbers in arrangement.batches(turn):
                self._round([playing[number] for number in numbers], turn, arrangement)
        for one in playing:
            self._leave(one.state, one.part.number)
        for stranger in strangers:
            self.state.close(stranger)
        self.state.check_integrity()
        return [one.rows for one in playing]

    def _strangers(self, count: int) -> Iterator[RequestState]:
        """Requests that hold every second slot and pages between those that are free."""
        opened = [self.state.open() for _ in range(2 * count)]
        for length in (1, self.state.page_tokens + 1):
            for request in opened:
                self.state.reserve(request, length)
        for place, request in enumerate(opened):
            if place % 2:
                yield request
            else:
                self.state.close(request)

    def _started(self, part: Part) -> _Playing:
        """A request whose first rows are computed in a pass of its own."""
        request = self.state.open()
        if self._draft is not None:
            self._draft.states[part.number] = request
        output = self._target.forward([SpanTokens(request, [], part.token_ids[: part.first], 1)])
        self.state.commit(request, part.first)
        self._absorb([(request, part.first)], output.target_hidden)
        return _Playing(part, request)

    def _round(self, playing: Sequence[_Playing], number: int, arrangement: Arrangement) -> None:
        """One target pass, its commits, and the blocks that follow."""
        turns = [one.part.turns[number] for one in playing]
        spans = [self._span(one, turn) for one, turn in zip(playing, turns, strict=True)]
        arrangement.before_pass(self.state)
        finish = arrangement.around_pass(self.state, spans)
        output = self._target.forward(spans)
        finish()
        places = [0]
        for turn in turns:
            places.append(places[-1] + turn.num_rows)
        kept = [output.logits.clone(), *([] if output.target_hidden is None else [output.target_hidden.clone()])]
        for one, place, turn in zip(playing, places, turns, strict=False):
            one.rows.append(tuple(part[place : place + turn.num_rows] for part in kept))
            self.state.commit(one.state, turn.num_committed)
        if self._draft is not None:
            rows = [range(place, place + turn.num_committed) for place, turn in zip(places, turns, strict=False)]
            chosen = kept[1][torch.tensor([row for span in rows for row in span], device=self.state.device)]
            committed = [(one.state, turn.num_committed) for one, turn in zip(playing, turns, strict=True)]
            self._absorb(committed, chosen)
            arrangement.before_pass(self.state)
            self._keep_blocks(playing)

    def _span(self, one: _Playing, turn: Turn) -> SpanTokens:
        start, tokens = one.state.committed, one.part.token_ids
        history = tokens[max(start - self._target.history_len, 0) : start]
        return SpanTokens(one.state, history, tokens[start : start + turn.num_rows], turn.num_rows)

    def _absorb(self, committed: list[tuple[RequestState, int]], hidden: Tensor | None) -> None:
        if self._draft is not None and hidden is not None:
            self._draft.absorb(committed, hidden)

    def _keep_blocks(self, playing: Sequence[_Playing]) -> None:
        assert self._draft is not None
        asked = [
            ProposalRequest(one.part.number, RequestSampling(_GREEDY, 1, one.part.token_ids[: one.state.committed + 1]))
            for one in playing
        ]
        block = self._draft.draft_block(asked)
        for place, one in enumerate(playing):
            one.rows.append((block.base_logits[place].clone(), block.hidden[place].clone()))

    def _leave(self, request: RequestState, number: int) -> None:
        self.state.close(request)
        if self._draft is not None:
            self._draft.forget(number)


_GREEDY = SamplingParams()
