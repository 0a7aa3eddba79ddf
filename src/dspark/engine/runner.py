"""Runs the two networks over the state: the target's ragged pass, and the draft's block pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dspark.config.errors import ConfigError
from dspark.engine.graphs import GraphPlan
from dspark.engine.pass_graphs import DraftGraphs, TargetGraphs
from dspark.engine.piecewise import PiecewiseTarget
from dspark.engine.stopwatch import Stopwatch
from dspark.models.build import Model
from dspark.models.decoder import PassTokens, TargetOutput
from dspark.models.dspark_draft import DsparkDraft
from dspark.scheduler.plan import RequestId
from dspark.speculative.dspark import DraftBlock
from dspark.speculative.proposer import ProposalRequest
from dspark.state.model_state import ModelState, RequestState
from dspark.state.spans import Span, next_span, row_positions
from dspark.state.views import DraftView, PassView, keep_context, open_pass


@dataclass(frozen=True)
class SpanTokens:
    """Rows of one request in a pass.

    Attributes:
        state: the request's place in the stores.
        history: final token ids before the first row; the last `TargetRunner.history_len` of them are enough.
        token_ids: tokens of the rows: known ones, then drafts.
        num_logits: rows at the end of the span whose logits are wanted.
    """

    state: RequestState
    history: Sequence[int]
    token_ids: Sequence[int]
    num_logits: int


@dataclass(frozen=True)
class PassOutput:
    """logits: [sum of num_logits, V] float32 in span order. target_hidden: [T, n * D] or None without a draft."""

    logits: Tensor
    target_hidden: Tensor | None


class TargetRunner:
    """Target passes.

    Attributes:
        history_len: tokens before a row that its pass reads, for Engram.
    """

    def __init__(
        self, model: Model, state: ModelState, graphs: GraphPlan | None = None, stopwatch: Stopwatch | None = None
    ) -> None:
        self.model = model
        self.state = state
        self._stopwatch = stopwatch or Stopwatch()
        self._graphs = TargetGraphs(model, state, graphs, self._stopwatch) if graphs and graphs.row_counts else None
        self._pieces = PiecewiseTarget(model, state, graphs) if graphs and graphs.piece_counts else None
        self._max_ngram = model.plan.max_ngram
        self.history_len = max(self._max_ngram - 1, 0)

    @torch.inference_mode()
    def forward(self, spans: Sequence[SpanTokens], num_padding: int = 0) -> PassOutput:
        """One pass over all spans; their rows become tentative. Padding rows follow and change nothing."""
        placed = [next_span(span.state, len(span.token_ids)) for span in spans]
        token_ids = [token for span in spans for token in span.token_ids]
        rows = [row for span in spans for row in self._ngrams(span)] if self._max_ngram else []
        if self._graphs is not None and all(span.num_logits == len(span.token_ids) for span in spans):
            num_rows = self._graphs.rows_for(placed)
            if num_rows is not None:
                open_pass(self.state, placed)
                return PassOutput(*self._graphs.launch(num_rows, placed, token_ids, rows))
        with self._stopwatch.phase("target"):
            output = self._pieces.run(placed, token_ids, rows or None) if self._pieces else None
            output = output or self._eager(placed, token_ids, rows, num_padding)
            return self._finished(spans, output)

    def _eager(self, placed: list[Span], token_ids: list[int], rows: list[list[int]], num_padding: int) -> TargetOutput:
        """The pass op by op."""
        view = PassView(self.state, placed, num_padding)
        device = self.state.device
        ngrams = None
        if self._max_ngram:
            ngrams = torch.tensor(rows + [[-1] * self._max_ngram] * num_padding, device=device)
        tokens = PassTokens(torch.tensor(token_ids + [0] * num_padding, device=device), ngrams)
        output: TargetOutput = self.model.target(tokens, view)
        return output

    def _finished(self, spans: Sequence[SpanTokens], output: TargetOutput) -> PassOutput:
        """Logits of the wanted rows alone."""
        device = self.state.device
        wanted: list[int] = []
        offset = 0
        for span in spans:
            offset += len(span.token_ids)
            wanted.extend(range(offset - span.num_logits, offset))
        hidden = output.hidden[torch.tensor(wanted, dtype=torch.int64, device=device)]
        logits = self.model.target.logits(hidden) if wanted else hidden.new_empty(0, self.model.plan.vocab_size)
        return PassOutput(logits, output.target_hidden)

    def _ngrams(self, span: SpanTokens) -> list[list[int]]:
        """The last n tokens up to each row, its own first; -1 before the start of the request."""
        back = self._max_ngram - 1
        known = [-1] * max(back - len(span.history), 0) + list(span.history[-back:] if back else [])
        tokens = known + list(span.token_ids)
        return [tokens[place - back : place + 1][::-1] for place in range(back, len(tokens))]


class DraftRunner:
    """Draft passes: the `DraftModel` of the speculative layer, over the same state.

    Attributes:
        graphs: the captured passes, where there are any.
        graphs_kind: their class.
    """

    graphs_kind: ClassVar[type[DraftGraphs]] = DraftGraphs

    def __init__(
        self,
        model: Model,
        state: ModelState,
        block_size: int,
        plan: GraphPlan | None = None,
        num_valid_tokens: int | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        if model.draft is None:
            raise ConfigError("this checkpoint has no draft stages: run it with speculation off")
        vocab_size = num_valid_tokens or model.plan.vocab_size
        self._stopwatch = stopwatch or Stopwatch()
        self.graphs: DraftGraphs | None = None
        if plan is not None and plan.row_counts:
            self.graphs = self.graphs_kind(model, state, plan, block_size, vocab_size, self._stopwatch)
        self.draft: DsparkDraft = model.draft
        self.target = model.target
        self.state = state
        self.block_size = block_size
        self.states: dict[RequestId, RequestState] = {}

    @torch.inference_mode()
    def absorb(self, committed: Sequence[tuple[RequestState, int]], target_hidden: Tensor) -> None:
        """Keep the draft's window rows of committed tokens.

        Only the last rows that a window can reach are computed.

        Args:
            committed: (request, rows just committed) in the order of target_hidden.
            target_hidden: [sum of rows, n * D].
        """
        spans, parts, offset = [], [], 0
        for request, num_rows in committed:
            kept = min(num_rows, self.state.max_context_rows)
            spans.append(Span(request, request.committed - kept, kept))
            parts.append(target_hidden[offset + num_rows - kept : offset + num_rows])
            offset += num_rows
        kept_hidden = torch.cat(parts)
        graph_rows = self.graphs.plan.rows_for(len(kept_hidden)) if self.graphs else None
        if self.graphs is not None and graph_rows is not None:
            self.graphs.absorb(graph_rows, spans, kept_hidden)
            return
        positions = torch.tensor(row_positions(spans), device=self.state.device)
        with self._stopwatch.phase("draft"):
            keep_context(self.state, spans, self.draft.context_rows(kept_hidden, positions))

    @torch.inference_mode()
    def draft_block(self, requests: Sequence[ProposalRequest]) -> DraftBlock:
        """See `DraftModel.draft_block`."""
        spans = [next_span(self.states[request.request_id], self.block_size) for request in requests]
        num_blocks = self.graphs.plan.rows_for(len(requests)) if self.graphs else None
        if self.graphs is not None and num_blocks is not None:
            return DraftBlock(*self.graphs.blocks(num_blocks, spans, [request.anchor_id for request in requests]))
        anchors = torch.tensor([request.anchor_id for request in requests], device=self.state.device)
        view = DraftView(self.state, spans)
        with self._stopwatch.phase("draft"):
            out = self.draft(self.draft.block_tokens(anchors, self.block_size), view, self.target)
            logits = self.target.logits(out.normed)
        shape = (len(requests), self.block_size, -1)
        return DraftBlock(logits.view(shape), out.hidden.view(shape))

    @torch.inference_mode()
    def markov_bias(self, prev_ids: Tensor) -> Tensor:
        """See `DraftModel.markov_bias`."""
        return self.draft.markov_bias(prev_ids)

    @torch.inference_mode()
    def confidence_logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """See `DraftModel.confidence_logits`."""
        return self.draft.confidence_logits(hidden, prev_ids)

    def forget(self, request_id: RequestId) -> None:
        """See `DraftModel.forget`."""
        self.states.pop(request_id, None)
