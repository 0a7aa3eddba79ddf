"""Rows of a fixed text decoded one token a pass, which every other way of writing them must reproduce to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dspark.models.build import Model
from dspark.models.dspark_draft import DraftHidden
from dspark.state.model_state import ModelState, RequestState
from dspark.state.spans import next_span
from dspark.state.views import DraftView
from support.alone import absorb, target_pass
from support.tiny_models import BLOCK, NUM_VALID, tiny_model, tiny_state

TEXT_LEN = 64


@dataclass(frozen=True)
class RowReference:
    """Row i of `logits` and `target_hidden` belongs to token i; `drafts[i]` is the block after i committed tokens."""

    tokens: list[int]
    logits: Tensor
    target_hidden: Tensor
    drafts: list[DraftHidden]


@cache
def row_reference(model_key: tuple[Any, ...], seed: int = 0) -> RowReference:
    """The text of a seed under a model, one row a pass in stores that hold nothing else."""
    model = tiny_model(*model_key)
    tokens = torch.randint(2, NUM_VALID, (TEXT_LEN,), generator=torch.Generator().manual_seed(seed)).tolist()
    state = tiny_state(model, num_slots=1, num_pages=16, garbage=0.0)
    request, logits, hidden = state.open(), [], []
    drafts = [draft_blocks(model, state, [request], [tokens[0]])]
    for position in range(TEXT_LEN - 1):
        row_logits, row_hidden = write_rows(model, state, [(request, tokens[: position + 1])])
        state.commit(request, 1)
        absorb(model, state, request, row_hidden)
        logits.append(row_logits)
        hidden.append(row_hidden)
        drafts.append(draft_blocks(model, state, [request], [tokens[position + 1]]))
    return RowReference(tokens, torch.cat(logits), torch.cat(hidden), drafts)


@torch.inference_mode()
def write_rows(
    model: Model, state: ModelState, rows: Sequence[tuple[RequestState, Sequence[int]]]
) -> tuple[Tensor, Tensor]:
    """One pass: logits and target_hidden of all its rows, which stay tentative."""
    output = target_pass(model, state, rows)
    return model.target.logits(output.hidden), output.target_hidden


@torch.inference_mode()
def keep_rows(
    model: Model, state: ModelState, request: RequestState, target_hidden: Tensor, num_rows: int | None = None
) -> None:
    """Commit the first rows of a request's pass, and give them to the draft."""
    count = target_hidden.shape[0] if num_rows is None else num_rows
    state.commit(request, count)
    absorb(model, state, request, target_hidden[:count])


@torch.inference_mode()
def draft_blocks(
    model: Model, state: ModelState, requests: Sequence[RequestState], anchors: Sequence[int]
) -> DraftHidden:
    """The draft's parallel pass after the committed rows of some requests."""
    view = DraftView(state, [next_span(request, BLOCK) for request in requests])
    return model.draft(model.draft.block_tokens(torch.tensor(anchors, device=state.device)), view, model.target)


def prefilled(model: Model, state: ModelState, tokens: Sequence[int], chunk: int | None = None) -> RequestState:
    """A request that has written `tokens`, in chunks of one size."""
    request = state.open()
    while request.committed < len(tokens):
        stop = min(request.committed + (chunk or len(tokens)), len(tokens))
        _, hidden = write_rows(model, state, [(request, tokens[:stop])])
        keep_rows(model, state, request, hidden)
    return request


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    kind = torch.int32 if left.dtype == torch.float32 else torch.int16
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))
