"""A round on the device: rows, pass, draw, verdict, commit, absorb, propose and lengths, without a word of the host.

Two launches make a round: the target's graph, keyed by its number of rows, and the draft's, keyed by the number of
blocks. Both read `RoundBuffers` and move them on, so the next round can be launched while this one runs. Where several
ranks share the model, all of them move on by rank 0's verdicts, drafts and lengths, whatever their own would be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.engine.fixed_passes import FixedDraft, FixedTarget, PassRows
from dspark.engine.graphs import GraphCache, GraphPlan
from dspark.engine.request import Request
from dspark.engine.round_buffers import RoundBuffers
from dspark.engine.speculation import Speculation
from dspark.engine.stopwatch import Stopwatch
from dspark.models.build import Model
from dspark.ops.draw import DrawKind
from dspark.ops.opset import ops_for
from dspark.ops.places import RowPlaces
from dspark.ops.rounds import RoundRows
from dspark.parallel.decisions import decided
from dspark.sampling.device_rows import DeviceSampling, draw_rows
from dspark.speculative.device_lengths import Bounds, DeviceLengths
from dspark.speculative.device_verdict import DeviceVerdict
from dspark.state.model_state import ModelState


@dataclass(frozen=True)
class RoundShape:
    """What a round is launched with.

    Attributes:
        num_rows: of the target's graph.
        capacity: positions that its rows can see.
        num_blocks: of the draft's graph; 0 proposes nothing.
        kind: how the tokens are drawn.
    """

    num_rows: int
    capacity: int
    num_blocks: int
    kind: DrawKind


@dataclass(frozen=True)
class PassResult:
    """rows: of the pass. logits: [T, V]. target_hidden: [T, n * D], None without a draft."""

    rows: RoundRows
    logits: Tensor
    target_hidden: Tensor | None


class DeviceRounds:
    """Launches rounds over its buffers.

    Args:
        plan: shapes of the graphs.
        speculation: how wide, and whether acceptance is forced.
        lengths: chooses verify lengths.
        num_valid_tokens: real vocabulary size.
    """

    def __init__(
        self,
        model: Model,
        state: ModelState,
        plan: GraphPlan,
        speculation: Speculation,
        lengths: DeviceLengths,
        num_valid_tokens: int,
        stopwatch: Stopwatch,
    ) -> None:
        width = speculation.num_speculative_tokens
        self.width = width
        self.lengths = lengths
        self._num_valid_tokens = num_valid_tokens
        self._ops = ops_for(state.device)
        self._ranks = model.target.ranks
        self._target = FixedTarget(model, state)
        self._draft = FixedDraft(model, state, width, num_valid_tokens) if width else None
        self._stopwatch = stopwatch
        max_pages = plan.max_pages(state.page_tokens)
        self.buffers = RoundBuffers(state.num_slots, width, model.plan.max_ngram, max_pages, state.device)
        self._sampling = DeviceSampling(state.num_slots, state.device)
        self._verdict = DeviceVerdict(speculation.forced, state.device)
        self._passes: GraphCache[PassResult] = GraphCache(plan.is_captured)
        self._ends: GraphCache[Tensor | None] = GraphCache(plan.is_captured)
        self._drafts: GraphCache[None] = GraphCache(plan.is_captured)

    def enter(self, requests: Sequence[Request]) -> None:
        """See `RoundBuffers.write`."""
        self._write(self.buffers.columns(requests))

    def _write(self, columns: Sequence[Sequence[int]]) -> None:
        self.buffers.write(columns)

    def empty(self, number: int) -> None:
        """Let a request have no rows from the next launch on."""
        self.buffers.table.limits[number].zero_()

    def set_pages(self, tables: Sequence[Sequence[int]]) -> None:
        """See `RoundBuffers.set_pages`."""
        self.buffers.set_pages(tables)

    def set_bounds(self, bounds: Bounds) -> None:
        """See `RoundBuffers.set_bounds`."""
        self.buffers.set_bounds(bounds)

    def set_sampling(self, params: Sequence[SamplingParams]) -> DrawKind:
        """How the first requests are drawn; returns what that needs."""
        return self._sampling.fill(params)

    @torch.inference_mode()
    def launch(self, shape: RoundShape) -> None:
        """The pass, the verdict, the commit, and what the draft keeps of it; then the next blocks."""
        self._launch_target(shape)
        if shape.num_blocks:
            with self._stopwatch.phase("draft"):
                self._drafts.launch((shape.num_blocks, shape.kind), lambda: self._propose(shape))

    def _launch_target(self, shape: RoundShape) -> None:
        """One launch, or one a phase while somebody listens."""
        key = shape.num_rows, shape.capacity, shape.kind
        moved = (self.buffers.table.words,)
        if self._stopwatch.listener is None:
            self._ends.launch(key, lambda: self._finish(shape, self._pass(shape)), moved)
            return
        with self._stopwatch.phase("target"):
            output = self._passes.launch(key, lambda: self._pass(shape))
        with self._stopwatch.phase("sampling"):
            slots = self._ends.launch(("decide", *key), lambda: self._decide(shape, output), moved)
        if self._draft is not None:  # a graph must hold a launch
            with self._stopwatch.phase("draft"):
                self._ends.launch(("absorb", *key), lambda: self._absorb(output, slots))

    def _pass(self, shape: RoundShape) -> PassResult:
        """The target over the rows of the round."""
        table = self.buffers.first(shape.num_rows)
        rows = self._ops.lay_rows(table, shape.num_rows)
        places = RowPlaces(rows.positions, rows.slots, rows.owners, self.buffers.pages[: table.words.shape[1]])
        ngrams = rows.ngrams if table.history_len else None
        return PassResult(rows, *self._target.run(PassRows(rows.token_ids, places, ngrams), shape.capacity))

    def _finish(self, shape: RoundShape, output: PassResult) -> None:
        slots = self._decide(shape, output)
        if self._draft is not None:
            self._absorb(output, slots)

    def _decide(self, shape: RoundShape, output: PassResult) -> Tensor:
        """Draw, judge and commit; returns the slots [T] of the rows that became final, -1 for the others."""
        table, rows = self.buffers.first(shape.num_rows), output.rows
        valid = self._num_valid_tokens
        drawn = draw_rows(output.logits, rows.drawers, rows.draws, self._sampling, shape.kind, valid)
        judged = self._verdict.judge(
            drawn, table.drafts, rows.starts, table.verify_lens, table.positions, self._sampling.params
        )
        num_accepted, token_ids = decided(self._ranks, judged.num_accepted, judged.token_ids)
        return self._ops.move_on(table, rows, num_accepted, token_ids, self.buffers.outcome[: len(rows.counts)])

    def _absorb(self, output: PassResult, slots: Tensor | None) -> None:
        """Let the draft keep the rows that became final."""
        assert self._draft is not None and output.target_hidden is not None and slots is not None
        self._draft.keep(output.target_hidden, output.rows.positions, slots)

    def _propose(self, shape: RoundShape) -> None:
        """Draft from the anchors, and choose how many drafts of each request the next round verifies."""
        assert self._draft is not None
        table = self.buffers.first(shape.num_blocks)
        blocks = self._ops.open_blocks(table)
        drafts, confidence = self._draft.draw(
            table.anchors, table.positions, blocks.slots, self._sampling.params, shape.kind
        )
        chosen = self.lengths.choose(confidence, blocks.limits, self.buffers.budget)
        drafts, verify_lens = decided(self._ranks, drafts, chosen)
        self._ops.keep_blocks(table, drafts, confidence, verify_lens, self.buffers.proposal[: len(drafts)])
