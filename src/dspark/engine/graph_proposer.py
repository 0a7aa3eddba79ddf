"""Draft blocks drawn inside the graph that computes them, where no host has to look at them."""

from collections.abc import Sequence

import torch

from dspark.engine.pass_graphs import DraftGraphs
from dspark.sampling.device_rows import drafts_on_device
from dspark.scheduler.plan import RequestId
from dspark.speculative.dspark import DSparkProposer
from dspark.speculative.proposer import Proposal, ProposalRequest
from dspark.state.model_state import RequestState
from dspark.state.spans import next_span


class GraphProposer:
    """Proposes what `inner` proposes, to the bit, in one launch where every request allows it.

    Args:
        inner: draws all other blocks, token by token.
        graphs: of the same draft.
        states: place of each request in the stores.
    """

    def __init__(self, inner: DSparkProposer, graphs: DraftGraphs, states: dict[RequestId, RequestState]) -> None:
        self.inner = inner
        self.num_speculative_tokens = inner.num_speculative_tokens
        self._graphs = graphs
        self._states = states

    @torch.inference_mode()
    def propose(self, requests: Sequence[ProposalRequest]) -> Proposal:
        """See `Proposer.propose`."""
        num_blocks = self._graphs.plan.rows_for(len(requests))
        if num_blocks is None or not all(drafts_on_device(request.sampling.params) for request in requests):
            return self.inner.propose(requests)
        spans = [next_span(self._states[request.request_id], self.num_speculative_tokens) for request in requests]
        params = [request.sampling.params for request in requests]
        anchors = [request.anchor_id for request in requests]
        token_ids, confidence = self._graphs.drawn_blocks(num_blocks, spans, anchors, params)
        return Proposal(tuple(request.request_id for request in requests), token_ids, confidence)

    def forget(self, request_id: RequestId) -> None:
        """See `Proposer.forget`."""
        self.inner.forget(request_id)
