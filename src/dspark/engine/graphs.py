"""Passes captured as graphs: static inputs, one graph a shape, one launch a pass.

A graph holds addresses of weights, stores and input buffers, and nothing of a request: which rows a pass writes and
reads is what the buffers say when it is launched. Shapes are captured when they are first used; the plain run before a
capture compiles the kernels and computes the same rows, which a launch then writes once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dspark.config import Config, CUDAGraphMode
from dspark.engine.device import graph_mode
from dspark.models.build import Model
from dspark.models.decoder import PassTokens, TargetOutput
from dspark.models.dspark_draft import DsparkDraft
from dspark.sampling.noise import gumbel_noise, seeds_tensor
from dspark.state.model_state import ModelState
from dspark.state.row_views import BlockRowView, RowPlaces, RowView, ring_places
from dspark.state.spans import Span

Result = TypeVar("Result")

DEFAULT_ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LEAST_CAPACITY = 512


@dataclass(frozen=True)
class GraphPlan:
    """What is captured.

    Attributes:
        row_counts: rows of a target pass, ascending; a pass takes the next larger one, and runs eagerly above them all.
        max_len: positions of a request at most.
        is_captured: false runs the passes of fixed shape one kernel after the other, as a host without graphs does.
    """

    row_counts: tuple[int, ...]
    max_len: int
    is_captured: bool = True

    def rows_for(self, num_rows: int) -> int | None:
        """Rows of the graph for a pass of so many; None where there is none."""
        return next((count for count in self.row_counts if count >= num_rows), None)

    def capacity_for(self, length: int) -> int:
        """Positions of the graph for requests of up to `length`: a power of two, or the longest request."""
        capacity = _LEAST_CAPACITY
        while capacity < length:
            capacity *= 2
        return capacity

    @property
    def num_capacities(self) -> int:
        """How many capacities there are."""
        return (self.capacity_for(self.max_len) // _LEAST_CAPACITY).bit_length()


def plan_graphs(config: Config, device: torch.device, max_query_len: int, max_len: int) -> GraphPlan | None:
    """The graphs of an admitted configuration; None where steps run eagerly."""
    if graph_mode(config, device) is not CUDAGraphMode.FULL:
        return None
    most = config.max_num_seqs * max_query_len
    wanted = config.compilation_config.cudagraph_capture_sizes or DEFAULT_ROW_COUNTS
    # The first count that holds every request's longest span is the last one of use.
    needed = sum(count < most for count in wanted) + 1
    return GraphPlan(tuple(wanted[:needed]), max_len)


class GraphCache(Generic[Result]):
    """Graphs of one function by shape. They share their memory: a result is good until the next launch of any."""

    def __init__(self, is_captured: bool) -> None:
        self._pool = torch.cuda.graph_pool_handle() if is_captured else None
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Result]] = {}

    def launch(self, shape: tuple[int, ...], body: Callable[[], Result]) -> Result:
        """Run `body`, whose launches depend on `shape` and static tensors only."""
        if self._pool is None:
            return body()
        if shape not in self._graphs:
            body()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = body()
            self._graphs[shape] = graph, result
        graph, result = self._graphs[shape]
        graph.replay()
        return result


class StaticRows:
    """Integer inputs of captured passes: columns [rows, columns] on the device, filled in one copy a pass.

    The host's copy is written again only after a pass has been waited for, which every round does when it reads its
    tokens.
    """

    def __init__(self, max_rows: int, num_columns: int, device: torch.device) -> None:
        self._host = torch.zeros(max_rows * num_columns, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(max_rows * num_columns, dtype=torch.int64, device=device)
        self._num_columns = num_columns

    def view(self, num_rows: int) -> Tensor:
        """The device tensor [columns, rows] of a shape."""
        return self._device[: num_rows * self._num_columns].view(self._num_columns, num_rows)

    def fill(self, num_rows: int, columns: Sequence[Sequence[int]], padding: Sequence[int]) -> None:
        """Set each column of a shape: given values, then its padding."""
        host = self._host[: num_rows * self._num_columns].view(self._num_columns, num_rows)
        filled = [[*column, *[pad] * (num_rows - len(column))] for column, pad in zip(columns, padding, strict=True)]
        host.copy_(torch.tensor(filled, dtype=torch.int64))
        self._device[: host.numel()].copy_(self._host[: host.numel()], non_blocking=True)


class TargetGraphs:
    """Captured target passes over short spans, logits of every row included."""

    def __init__(self, model: Model, state: ModelState, plan: GraphPlan) -> None:
        self.model = model
        self.state = state
        self.plan = plan
        self._max_ngram = model.plan.ngrams.max_ngram if model.plan.ngrams else 0
        most = plan.row_counts[-1]
        self._rows = StaticRows(most, 4 + self._max_ngram, state.device)
        max_pages = -(-plan.capacity_for(plan.max_len) // state.page_tokens)
        self._pages = torch.zeros(most, max_pages, dtype=torch.int64, device=state.device)
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
        positions = [position for span in spans for position in range(span.start, span.stop)]
        slots = [span.request.slot for span in spans for _ in range(span.num_rows)]
        owners = [number for number, span in enumerate(spans) for _ in range(span.num_rows)]
        columns = [token_ids, positions, slots, owners, *zip(*ngrams, strict=True)]
        padding = [0, 0, -1, len(spans) - 1, *[-1] * self._max_ngram]
        self._rows.fill(num_rows, columns, padding)
        self._fill_pages(spans)
        capacity = self.plan.capacity_for(max(span.stop for span in spans))
        logits, hidden = self._graphs.launch((num_rows, capacity), lambda: self._pass(num_rows, capacity))
        count = len(positions)
        return logits[:count], None if hidden is None else hidden[:count]

    def _fill_pages(self, spans: Sequence[Span]) -> None:
        longest = max(len(span.request.pages) for span in spans)
        tables = [span.request.pages + [0] * (longest - len(span.request.pages)) for span in spans]
        self._pages[: len(spans), :longest] = torch.tensor(tables, dtype=torch.int64).to(self.state.device)

    def _pass(self, num_rows: int, capacity: int) -> tuple[Tensor, Tensor | None]:
        token_ids, positions, slots, owners, *ngrams = self._rows.view(num_rows)
        places = RowPlaces(positions, slots, owners, self._pages[:num_rows])
        view = RowView(self.state, places, capacity, self.model.target.ops.write_rows)
        tokens = PassTokens(token_ids, torch.stack(ngrams, dim=1) if ngrams else None)
        output: TargetOutput = self.model.target(tokens, view)
        return self.model.target.logits(output.hidden), output.target_hidden


class DraftGraphs:
    """Captured draft passes: the context rows of committed tokens, blocks, and blocks that draw their own tokens.

    Args:
        num_valid_tokens: real vocabulary size.
    """

    def __init__(
        self, model: Model, state: ModelState, plan: GraphPlan, block_size: int, num_valid_tokens: int
    ) -> None:
        assert model.draft is not None
        self.draft: DsparkDraft = model.draft
        self.target = model.target
        self.state = state
        self.plan = plan
        self.block_size = block_size
        self.num_valid_tokens = num_valid_tokens
        most = plan.row_counts[-1]
        self._seeds = torch.zeros(most, dtype=torch.int64, device=state.device)
        self._temperatures = torch.zeros(most, 1, device=state.device)
        self._committed = StaticRows(most, 2, state.device)
        self._blocks = StaticRows(most, 3, state.device)
        width = len(model.draft.plan.target_layer_ids) * model.plan.hidden_size
        self._hidden = torch.zeros(most, width, dtype=model.target.dtype, device=state.device)
        self._absorbs: GraphCache[None] = GraphCache(plan.is_captured)
        self._drafts: GraphCache[tuple[Tensor, Tensor]] = GraphCache(plan.is_captured)
        self._drawn: GraphCache[tuple[Tensor, Tensor]] = GraphCache(plan.is_captured)

    def absorb(self, num_rows: int, spans: Sequence[Span], target_hidden: Tensor) -> None:
        """Keep the draft's window rows of committed tokens; `num_rows` is that of a graph."""
        positions = [position for span in spans for position in range(span.start, span.stop)]
        slots = [span.request.slot for span in spans for _ in range(span.num_rows)]
        self._committed.fill(num_rows, [positions, slots], [0, -1])
        self._hidden[: len(positions)] = target_hidden
        self._absorbs.launch((num_rows,), lambda: self._keep(num_rows))

    def _keep(self, num_rows: int) -> None:
        positions, slots = self._committed.view(num_rows)
        for key, rows in self.draft.context_rows(self._hidden[:num_rows], positions):
            ring = self.state.rings[key]
            places = ring_places(slots, positions, ring.shape[1])
            self.target.ops.write_rows(ring.view(-1, ring.shape[2]), places, rows)

    def blocks(self, num_blocks: int, spans: Sequence[Span], anchors: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Base logits [R, G, V] and hidden [R, G, D] of draft blocks; the next launch overwrites them."""
        columns = [anchors, [span.start for span in spans], [span.request.slot for span in spans]]
        self._blocks.fill(num_blocks, columns, [0, 0, -1])
        logits, hidden = self._drafts.launch((num_blocks,), lambda: self._draft(num_blocks))
        return logits[: len(spans)], hidden[: len(spans)]

    def drawn_blocks(
        self,
        num_blocks: int,
        spans: Sequence[Span],
        anchors: Sequence[int],
        seeds: Sequence[int],
        temperatures: Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [R, G] and confidence logits [R, G] of blocks drawn greedily or by a temperature alone."""
        columns = [anchors, [span.start for span in spans], [span.request.slot for span in spans]]
        self._blocks.fill(num_blocks, columns, [0, 0, -1])
        is_sampled = any(temperature > 0 for temperature in temperatures)
        if is_sampled:
            count = len(temperatures)
            self._seeds[:count] = seeds_tensor(seeds, self.state.device)
            self._temperatures[:count, 0] = torch.tensor(temperatures, dtype=torch.float64).to(self._temperatures)
        body = partial(self._draw, num_blocks, is_sampled)
        token_ids, confidence = self._drawn.launch((num_blocks, int(is_sampled)), body)
        return token_ids[: len(spans)].clone(), confidence[: len(spans)].clone()

    def _draw(self, num_blocks: int, is_sampled: bool) -> tuple[Tensor, Tensor]:
        """The loop of `DSparkProposer` over static inputs; a temperature of 0 takes the argmax."""
        logits, hidden = self._draft(num_blocks)
        previous, starts, _ = self._blocks.view(num_blocks)
        temperatures = self._temperatures[:num_blocks]
        is_warm = temperatures[:, 0] > 0
        tokens, confidences = [], []
        for k in range(self.block_size):
            confidences.append(self.draft.confidence_logits(hidden[:, k], previous))
            corrected = (logits[:, k].float() + self.draft.markov_bias(previous).float())[:, : self.num_valid_tokens]
            previous = corrected.argmax(-1)
            if is_sampled:
                scaled = (corrected - corrected.amax(-1, keepdim=True)) / temperatures
                noise = gumbel_noise(self._seeds[:num_blocks], starts + 1 + k, self.num_valid_tokens)
                previous = torch.where(is_warm, (scaled + noise).argmax(-1), previous)
            tokens.append(previous)
        return torch.stack(tokens, dim=1), torch.stack(confidences, dim=1)

    def _draft(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        anchors, starts, slots = self._blocks.view(num_blocks)
        view = BlockRowView(self.state, starts, slots, self.block_size)
        out = self.draft(self.draft.block_tokens(anchors, self.block_size), view, self.target)
        shape = (num_blocks, self.block_size, -1)
        return self.target.logits(out.normed).view(shape), out.hidden.view(shape)
