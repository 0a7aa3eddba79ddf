"""Target passes in captured pieces: what rows give by themselves is launched as graphs, what looks at the state is not.

A piece reaches from one layer's attention to the next one's. Its shape is the number of rows alone, so passes of any
spans can be launched: prompt chunks, and batches of chunks and rounds. Between two pieces the layer's own attention
runs op by op over the pass's requests, as in a pass without graphs. Padding rows follow the real ones, as there.

All that crosses a seam lies in buffers that the layers share, so a piece's memory is free for the next ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dspark.engine.graphs import GraphPlan
from dspark.layers.attention import PassContext, Prepared
from dspark.models.build import Model
from dspark.models.decoder import PassTokens, Seam, TargetOutput, run_stages
from dspark.state.model_state import ModelState
from dspark.state.spans import Span
from dspark.state.views import PassView


@dataclass
class _Tape:
    """The pieces of passes of one number of rows.

    Attributes:
        tokens, positions: static inputs.
        graphs: one more than there are seams.
        seams: what each piece leaves for the layer's attention. heads: where that puts its result.
        context: rotations that the pieces compute.
        output: of the last piece.
    """

    tokens: PassTokens
    positions: Tensor
    graphs: list[torch.cuda.CUDAGraph]
    seams: list[Seam]
    heads: list[Tensor]
    context: PassContext
    output: TargetOutput


class PiecewiseTarget:
    """Target passes over any spans, launched in pieces.

    Args:
        plan: its `piece_counts` are the numbers of rows; without capture the stages run one after the other.
    """

    def __init__(self, model: Model, state: ModelState, plan: GraphPlan) -> None:
        self._target = model.target
        self._state = state
        self._plan = plan
        self._pool = torch.cuda.graph_pool_handle() if plan.is_captured else None
        self._tapes: dict[int, _Tape] = {}
        self._shared: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

    def run(
        self, spans: list[Span], token_ids: Sequence[int], ngrams: Sequence[Sequence[int]] | None
    ) -> TargetOutput | None:
        """A pass over spans that it opens; None where it has too many rows. The next pass overwrites the result.

        Args:
            ngrams: [T][n] token ids, None without Engram.
        """
        num_rows = self._plan.pieces_for(len(token_ids))
        if num_rows is None:
            return None
        num_padding = num_rows - len(token_ids)
        view = PassView(self._state, spans, num_padding)
        device = self._state.device
        rows = torch.tensor([*token_ids, *[0] * num_padding], device=device)
        known = None
        if ngrams is not None:
            missing = [[-1] * len(ngrams[0])] * num_padding
            known = torch.tensor([*ngrams, *missing], device=device)
        tokens = PassTokens(rows, known)
        if self._pool is None:
            return self._plain(tokens, view)
        if num_rows in self._tapes:
            return self._replayed(self._tapes[num_rows], tokens, view)
        # The plain pass compiles the kernels and gives the result; the state is not touched by the capture behind it.
        output = self._plain(tokens, view)
        self._tapes[num_rows] = self._captured(tokens, view.positions)
        return output

    def _plain(self, tokens: PassTokens, view: PassView) -> TargetOutput:
        """The stages one after the other, across the shared buffers."""
        context = PassContext()

        def look(seam: Seam) -> Tensor:
            return self._keep("heads", self._crossed(seam).look(view, context))

        return run_stages(self._target.stages(tokens, view.positions, context), look)

    def _captured(self, tokens: PassTokens, positions: Tensor) -> _Tape:
        """Capture every piece; what attention would put between them is left as it is."""
        ngrams = None if tokens.ngrams is None else tokens.ngrams.clone()
        static, positions, context = PassTokens(tokens.token_ids.clone(), ngrams), positions.clone(), PassContext()
        stages = self._target.stages(static, positions, context)
        graphs: list[torch.cuda.CUDAGraph] = []
        seams: list[Seam] = []
        heads: list[Tensor] = []
        torch.cuda.synchronize()
        while True:
            graphs.append(torch.cuda.CUDAGraph())
            seam, output = None, None
            with torch.cuda.graph(graphs[-1], pool=self._pool):
                try:
                    seam = self._crossed(stages.send(heads[-1] if heads else None))
                except StopIteration as end:
                    output = end.value
            if seam is None:
                assert output is not None
                return _Tape(static, positions, graphs, seams, heads, context, output)
            seams.append(seam)
            heads.append(self._heads_of(seam))

    def _replayed(self, tape: _Tape, tokens: PassTokens, view: PassView) -> TargetOutput:
        tape.tokens.token_ids.copy_(tokens.token_ids)
        tape.positions.copy_(view.positions)
        if tape.tokens.ngrams is not None and tokens.ngrams is not None:
            tape.tokens.ngrams.copy_(tokens.ngrams)
        context = PassContext(turns=dict(tape.context.turns))
        for graph, seam, heads in zip(tape.graphs, tape.seams, tape.heads, strict=False):
            graph.replay()
            heads.copy_(seam.look(view, context))
        tape.graphs[-1].replay()
        return tape.output

    def _crossed(self, seam: Seam) -> Seam:
        """The same seam with its tensors in the shared buffers."""
        given = {one.name: getattr(seam.prepared, one.name) for one in fields(Prepared)}
        moved = {name: self._keep(name, value) for name, value in given.items() if value is not None}
        return replace(seam, prepared=replace(seam.prepared, **moved))

    def _keep(self, name: str, value: Tensor) -> Tensor:
        """A copy in the buffer for values of this name and shape; the plain pass makes it before any capture."""
        key = name, value.shape, value.dtype
        if key not in self._shared:
            self._shared[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
        return self._shared[key].copy_(value)

    def _heads_of(self, seam: Seam) -> Tensor:
        """The buffer for a layer's heads."""
        plan, rows = seam.attention.plan, seam.prepared.q
        return self._shared["heads", torch.Size((len(rows), plan.num_heads, plan.head_dim)), rows.dtype]
