"""Stretches: while the same requests decode, rounds stay on the device and the host reads them one step late.

A step launches the next round before it reads the one that runs, so the device never waits for the host. What the host
finds out late costs a round of the request that it concerns, and nothing else: the rows of a round lie beyond the
committed ones, so whatever it did for a request that had ended, stopped or left is never read. Everything unusual ends
the stretch: what is out is read, and the general step goes on from there.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.engine.core import Engine
from dspark.engine.device_round import DeviceRounds, RoundShape
from dspark.engine.graphs import GraphPlan
from dspark.engine.request import Emission, PendingDraft, Request
from dspark.engine.round_buffers import NUM_TURNS, Landing
from dspark.ops.draw import DrawKind
from dspark.sampling.device_rows import draws_on_device
from dspark.scheduler.plan import PlannedSpan
from dspark.speculative.device_lengths import device_lengths
from dspark.speculative.survival import compute_survival
from dspark.state.model_state import RequestState


@dataclass
class Column:
    """A request of the stretch, with the state that it had when it entered.

    Attributes:
        is_empty: the device knows that the request is gone.
    """

    request: Request
    state: RequestState
    is_empty: bool = False

    @property
    def is_live(self) -> bool:
        """Whether the request is still in this life: not ended, not stopped and started again."""
        return self.request.state is self.state and self.request.finish_reason is None


@dataclass(frozen=True)
class Flight:
    """A round that was launched and is not read.

    Attributes:
        outcome, proposal: where it lands; no proposal where nothing was drafted.
    """

    outcome: Landing
    proposal: Landing | None


class RunAhead:
    """Runs the rounds of one stretch after the other.

    Args:
        engine: whose requests, state and counts they are.
        rounds: launches them.
        max_rows: rows of a step.
    """

    def __init__(self, engine: Engine, rounds: DeviceRounds, plan: GraphPlan, max_rows: int) -> None:
        self._engine = engine
        self._rounds = rounds
        self._plan = plan
        self._max_rows = max_rows
        self._query_len = 1 + rounds.width
        self._columns: list[Column] = []
        self._flights: deque[Flight] = deque()
        self._blocks: Landing | None = None  # those of the round that was read last
        self._outcomes = [Landing(rounds.buffers.outcome) for _ in range(NUM_TURNS)]
        self._proposals = [Landing(rounds.buffers.proposal) for _ in range(NUM_TURNS)]
        self._num_launched = 0
        self._kind = DrawKind.GREEDY
        self._num_rows = 0  # of the next round at most
        self._survival: NDArray[np.float64] | None = None

    @property
    def is_flying(self) -> bool:
        """Whether a round is out whose results somebody waits for."""
        return bool(self._flights) and any(column.is_live for column in self._columns)

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether the next step of all running requests can be a round on the device."""
        if not requests:
            return False
        if self.is_flying:
            return self._is_stretch_of(requests)
        num_rows = len(requests) * self._query_len
        has_shape = num_rows <= self._max_rows and self._plan.rows_for(num_rows) is not None
        return has_shape and all(map(_is_ready, requests))

    def _is_stretch_of(self, requests: Sequence[Request]) -> bool:
        """Whether the stretch has these requests, and not so many empty columns that fewer rows would do."""
        live = [column.request for column in self._columns if column.is_live]
        if len(live) != len(requests) or any(a is not b for a, b in zip(live, requests, strict=True)):
            return False
        sizes = [self._plan.rows_for(count * self._query_len) for count in (len(live), len(self._columns))]
        return sizes[0] == sizes[1]

    def pages_needed(self, requests: Sequence[Request]) -> int:
        """Pages that `advance` takes."""
        return sum(
            self._engine.state.pages_needed(request.state, self._reach(request, 2))
            for request in requests
            if request.state is not None
        )

    def _reach(self, request: Request, num_rounds: int) -> int:
        """Rows that so many rounds write after the committed ones at most."""
        assert request.state is not None
        return min(num_rounds * self._query_len, request.max_len - request.state.committed)

    def advance(self, requests: Sequence[Request]) -> list[Emission]:
        """Launch a round, two where none is out, and read the oldest."""
        if not self.is_flying:
            self._enter(requests)
            self._launch()
        self._empty_columns()
        if any(column.is_live and column.request.num_left > len(self._flights) for column in self._columns):
            self._launch()
        emissions = self._read()
        if not self._flights:
            self._take_blocks()
        return emissions

    def drain(self) -> list[Emission]:
        """Read what is out, and hand its drafts to the requests: the host knows everything afterwards."""
        emissions = [emission for _ in range(len(self._flights)) for emission in self._read()]
        self._take_blocks()
        self._columns.clear()
        return emissions

    def _enter(self, requests: Sequence[Request]) -> None:
        """Begin a stretch."""
        for flight in self._flights:  # of a stretch whose requests are all gone
            flight.outcome.wait()
        self._flights.clear()
        self._take_blocks()
        self._columns = [Column(request, request.state) for request in requests if request.state is not None]
        self._rounds.enter(requests)
        self._kind = self._rounds.set_sampling([request.params for request in requests])
        self._num_rows = sum(1 + (request.draft.verify_len if request.draft else 0) for request in requests)
        self._survival = None

    def _empty_columns(self) -> None:
        """Let requests that ended or left have no rows from the next launch on."""
        for number, column in enumerate(self._columns):
            if not column.is_live and not column.is_empty:
                self._rounds.empty(number)
                column.is_empty = True

    def _launch(self) -> None:
        """Send one more round out."""
        live = [column.request for column in self._columns if column.is_live]
        num_rounds = len(self._flights) + 1
        for column in self._columns:
            if column.is_live:
                column.state.ahead = self._reach(column.request, num_rounds)
                self._engine.state.reserve(column.state, column.state.ahead)
        self._rounds.set_pages([column.state.pages for column in self._columns])
        reach = max(column.state.committed + column.state.ahead for column in self._columns if column.is_live)
        num_rows, num_blocks = self._plan.rows_for(self._num_rows), 0
        assert num_rows is not None
        self._num_rows = len(self._columns)
        if self._is_drafting(live, num_rounds):
            num_blocks = self._plan.rows_for(len(self._columns)) or 0
            self._num_rows += self._allow_drafts()
        self._rounds.launch(RoundShape(num_rows, self._plan.capacity_for(reach), num_blocks, self._kind))
        self._flights.append(self._send_home(has_blocks=num_blocks > 0))

    def _is_drafting(self, live: Sequence[Request], num_rounds: int) -> bool:
        """Whether a round proposes: drafts pay, and somebody has two tokens left after it for all that is known."""
        wanted = self._rounds.width > 0 and self._engine.health.is_drafting
        return wanted and any(request.num_left > num_rounds + 1 for request in live)

    def _allow_drafts(self) -> int:
        """Bound the lengths of the blocks that are launched next; returns how many drafts are verified at most."""
        count = len(self._columns)
        bounds = self._rounds.lengths.bounds(count, self._rounds.width, self._survival)
        self._rounds.set_bounds(bounds)
        lengths = [length for length, column in zip(bounds.lengths, self._columns, strict=True) if column.is_live]
        return min(sum(lengths), bounds.budget)

    def _send_home(self, *, has_blocks: bool) -> Flight:
        turn, count = self._num_launched % NUM_TURNS, len(self._columns)
        self._num_launched += 1
        self._outcomes[turn].send(count)
        if has_blocks:
            self._proposals[turn].send(count)
        return Flight(self._outcomes[turn], self._proposals[turn] if has_blocks else None)

    def _read(self) -> list[Emission]:
        """Wait for the oldest round, and emit and commit what it decided."""
        flight = self._flights.popleft()
        self._take_blocks()
        emissions = []
        rows = flight.outcome.wait()[: len(self._columns)].tolist()
        for column, (verify_len, num_accepted, *token_ids) in zip(self._columns, rows, strict=True):
            if not column.is_live:
                continue
            request, state = column.request, column.state
            planned = PlannedSpan(request.request_id, 1, verify_len)
            emission = self._engine.emit(request, planned, token_ids[: num_accepted + 1], num_accepted)
            state.tentative = planned.num_rows
            self._engine.state.commit(state, 1 + emission.num_accepted)
            state.ahead = self._reach(request, len(self._flights))
            emissions.append(emission)
        self._blocks = flight.proposal
        return emissions

    def _take_blocks(self) -> None:
        """Give the requests the drafts of the round that was read last."""
        blocks, self._blocks = self._blocks, None
        if blocks is None:
            return
        rows = blocks.wait()[: len(self._columns)].clone()
        confidence = rows[:, -self._rounds.width :].to(torch.int32).view(torch.float32)
        for number, (column, row) in enumerate(zip(self._columns, rows.tolist(), strict=True)):
            if column.is_live and column.request.num_left > 1:
                drafts = row[1 : 1 + self._rounds.width]
                column.request.draft = PendingDraft(drafts, None, row[0], confidence[number])
        if self._rounds.lengths.reads_survival:
            self._survival = compute_survival(confidence, self._engine.speculation.temperatures)


def run_ahead_of(engine: Engine, max_rows: int) -> RunAhead | None:
    """The stretches of an engine whose passes have fixed shapes and whose drafts, if any, are its own."""
    plan, speculation = engine.graphs, engine.speculation
    if plan is None or not plan.runs_ahead or speculation.proposer is not None:
        return None
    lengths = device_lengths(speculation.lengths, speculation.temperatures)
    if lengths is None:
        return None
    width = speculation.num_speculative_tokens
    assert engine.state.max_ahead >= 1 + width, "the rings have no room for rounds that run ahead"
    return RunAhead(engine, engine.make_rounds(plan, lengths), plan, max_rows)


def _is_ready(request: Request) -> bool:
    """Whether a request stands at its anchor and is drawn from its logits alone."""
    return request.state is not None and request.num_pending == 1 and draws_on_device(request.params)
