"""Captured passes that the host fills: the target's over short spans, the draft's over blocks and committed rows."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.engine.fixed_passes import FixedDraft, FixedTarget, PassRows
from dspark.engine.graphs import GraphCache, GraphPlan, StaticRows
from dspark.engine.stopwatch import Stopwatch
from dspark.models.build import Model
from dspark.ops.places import RowPlaces
from dspark.sampling.device_rows import DeviceSampling
from dspark.state.model_state import ModelState
from dspark.state.spans import Span, page_table, row_owners, row_positions, row_slots


class TargetGraphs:
    """Captured target passes over short spans, logits of every row included."""

    def __init__(self, model: Model, state: ModelState, plan: GraphPlan, stopwatch: Stopwatch) -> None:
        self.state = state
        self.plan = plan
        self._target = FixedTarget(model, state)
        self._stopwatch = stopwatch
        most = plan.row_counts[-1]
        self._rows = StaticRows(most, 4 + model.plan.max_ngram, state.device)
        self._pages = torch.zeros(most, plan.max_pages(state.page_tokens), dtype=torch.int64, device=state.device)
        self._graphs: GraphCache[tuple[Tensor, Tensor | None]] = GraphCache(plan.is_captured)

    def rows_for(self, spans: Sequence[Span]) -> int | None:
        """Rows of the graph that can run a pass over these spans; None where none can."""
        if any(span.num_rows > self.state.max_query_len for span in spans):
            return None
        return self.plan.rows_for(sum(span.num_rows for span in spans))

    def launch(
        self, num_rows: int, spans: Sequence[Span], token_ids: Sequence[int], ngrams: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [T, V] and target_hidden [T, n * D] of all rows of an open pass; the next launch overwrites them.

        Args:
            num_rows: rows of the graph, see `rows_for`.
            ngrams: [T][n] token ids, empty without Engram.
        """
        columns = [token_ids, row_positions(spans), row_slots(spans), row_owners(spans), *zip(*ngrams, strict=True)]
        padding = [0, 0, -1, len(spans) - 1, *[-1] * self._target.model.plan.max_ngram]
        self._rows.fill(num_rows, columns, padding)
        table = torch.tensor(page_table([span.request.pages for span in spans]), dtype=torch.int64)
        self._pages[: len(spans), : table.shape[1]] = table.to(self.state.device)
        capacity = self.plan.capacity_for(max(span.stop for span in spans))
        with self._stopwatch.phase("target"):
            logits, hidden = self._graphs.launch((num_rows, capacity), lambda: self._pass(num_rows, capacity))
        count = len(token_ids)
        return logits[:count], None if hidden is None else hidden[:count]

    def _pass(self, num_rows: int, capacity: int) -> tuple[Tensor, Tensor | None]:
        token_ids, positions, slots, owners, *ngrams = self._rows.view(num_rows)
        places = RowPlaces(positions, slots, owners, self._pages[:num_rows])
        rows = PassRows(token_ids, places, torch.stack(ngrams, dim=1) if ngrams else None)
        return self._target.run(rows, capacity)


class DraftGraphs:
    """Captured draft passes: the context rows of committed tokens, blocks, and blocks that draw their own tokens.

    Args:
        num_valid_tokens: real vocabulary size.
    """

    def __init__(
        self,
        model: Model,
        state: ModelState,
        plan: GraphPlan,
        block_size: int,
        num_valid_tokens: int,
        stopwatch: Stopwatch,
    ) -> None:
        assert model.draft is not None
        self.state = state
        self.plan = plan
        self._draft = FixedDraft(model, state, block_size, num_valid_tokens)
        self._stopwatch = stopwatch
        most = plan.row_counts[-1]
        self._sampling = DeviceSampling(most, state.device)
        self._committed = StaticRows(most, 2, state.device)
        self._blocks = StaticRows(most, 3, state.device)
        width = len(model.draft.plan.target_layer_ids) * model.plan.hidden_size
        self._hidden = torch.zeros(most, width, dtype=model.target.dtype, device=state.device)
        self._absorbs: GraphCache[None] = GraphCache(plan.is_captured)
        self._drafts: GraphCache[tuple[Tensor, Tensor]] = GraphCache(plan.is_captured)
        self._drawn: GraphCache[tuple[Tensor, Tensor]] = GraphCache(plan.is_captured)

    def absorb(self, num_rows: int, spans: Sequence[Span], target_hidden: Tensor) -> None:
        """Keep the draft's window rows of committed tokens; `num_rows` is that of a graph."""
        self._committed.fill(num_rows, [row_positions(spans), row_slots(spans)], [0, -1])
        self._hidden[: len(target_hidden)] = target_hidden
        with self._stopwatch.phase("draft"):
            self._absorbs.launch((num_rows,), lambda: self._keep(num_rows))

    def _keep(self, num_rows: int) -> None:
        positions, slots = self._committed.view(num_rows)
        self._draft.keep(self._hidden[:num_rows], positions, slots)

    def blocks(self, num_blocks: int, spans: Sequence[Span], anchors: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Base logits [R, G, V] and hidden [R, G, D] of draft blocks; the next launch overwrites them."""
        self._fill_blocks(num_blocks, spans, anchors)
        body = partial(self._draft.blocks, *self._blocks.view(num_blocks))
        with self._stopwatch.phase("draft"):
            logits, hidden = self._drafts.launch((num_blocks,), body)
        return logits[: len(spans)], hidden[: len(spans)]

    def _fill_blocks(self, num_blocks: int, spans: Sequence[Span], anchors: Sequence[int]) -> None:
        columns = [anchors, [span.start for span in spans], [span.request.slot for span in spans]]
        self._blocks.fill(num_blocks, columns, [0, 0, -1])

    def drawn_blocks(
        self,
        num_blocks: int,
        spans: Sequence[Span],
        anchors: Sequence[int],
        params: Sequence[SamplingParams],
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [R, G] and confidence logits [R, G] of blocks that are drawn where their logits are."""
        self._fill_blocks(num_blocks, spans, anchors)
        kind = self._sampling.fill(params)
        placed, starts, slots = self._blocks.view(num_blocks)
        body = partial(self._draft.draw, placed, starts, slots, self._sampling.params, kind)
        with self._stopwatch.phase("draft"):
            token_ids, confidence = self._drawn.launch((num_blocks, kind), body)
        return token_ids[: len(spans)].clone(), confidence[: len(spans)].clone()
