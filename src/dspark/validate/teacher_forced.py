"""A model run on given tokens, as the reference ran: one prefill, then one token a pass, a draft after each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.layers.engram import Engram
from dspark.models.build import Model
from dspark.models.decoder import PassTokens, TargetOutput
from dspark.models.dspark_draft import DsparkDraft
from dspark.state.geometry import state_geometry
from dspark.state.model_state import ModelState
from dspark.state.spans import Span, next_span
from dspark.state.views import DraftView, PassView, keep_context
from dspark.validate.golden_case import GoldenRun


@dataclass(frozen=True)
class Observed:
    """What the model computed; rows as in the reference's tensors of the same names.

    Args:
        prefill_logits: [P, V]. decode_logits: [N, V]. main_hidden_prefill, main_hidden_decode: [P or N, n * D], or
            None without a draft.
        draft_ids: [N, G + 1], the anchor first. draft_logits: [N, G, V]. confidence: [N, G] before the sigmoid.
        engram_hash_ids: [P + N, Engram layers, columns], or None without Engram.
    """

    prefill_logits: Tensor
    decode_logits: Tensor
    main_hidden_prefill: Tensor | None
    main_hidden_decode: Tensor | None
    draft_ids: Tensor | None
    draft_logits: Tensor | None
    confidence: Tensor | None
    engram_hash_ids: Tensor | None


@torch.inference_mode()
def run_teacher_forced(model: Model, run: GoldenRun) -> Observed:
    """Feed the reference's tokens, whatever the model itself would choose."""
    forced = _Forced(model, run)
    prefill_logits, prefill_hidden = forced.advance(len(run.prompt_ids))
    logits, hidden, drafts = [], [], []
    for anchor in run.generated_ids[1:]:
        row_logits, row_hidden = forced.advance(1)
        logits.append(row_logits)
        hidden.append(row_hidden)
        if model.draft is not None:
            drafts.append(forced.draft(model.draft, anchor))
    return Observed(
        prefill_logits=prefill_logits,
        decode_logits=torch.cat(logits),
        main_hidden_prefill=prefill_hidden,
        main_hidden_decode=_cat(hidden),
        draft_ids=torch.stack([ids for ids, _, _ in drafts]) if drafts else None,
        draft_logits=torch.stack([rows for _, rows, _ in drafts]) if drafts else None,
        confidence=torch.stack([scores for _, _, scores in drafts]) if drafts else None,
        engram_hash_ids=forced.engram_hash_ids(),
    )


def _cat(rows: list[Tensor | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return torch.cat(present) if present else None


def _on_host(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.cpu()


class _Forced:
    """One request whose tokens are known beforehand."""

    def __init__(self, model: Model, run: GoldenRun) -> None:
        self.model = model
        # The last generated token is only ever an anchor: no row of the target is computed from it.
        self.token_ids = [*run.prompt_ids, *run.generated_ids[:-1]]
        block = model.draft.plan.block_size if model.draft is not None else 0
        num_pages = -(-len(self.token_ids) // state_geometry(model.plan).page_tokens)
        self.device = model.target.embed.weight.device
        self.state = ModelState(model.plan, 1, num_pages, 1 + block, dtype=model.target.dtype, device=self.device)
        self.request = self.state.open()
        self.hashes: dict[int, list[Tensor]] = {}
        for index, layer in enumerate(model.target.layers):
            if isinstance(layer.engram, Engram):
                layer.engram.register_forward_pre_hook(self._hash_recorder(index))

    def _hash_recorder(self, layer: int) -> Callable[[Engram, tuple[Tensor, Tensor]], None]:
        """A hook that keeps the table rows which one Engram layer looks up."""

        def record(engram: Engram, inputs: tuple[Tensor, Tensor]) -> None:
            self.hashes.setdefault(layer, []).append(engram.hashes(inputs[1]))

        return record

    def advance(self, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """One target pass whose rows are all committed, and absorbed by the draft: logits and target_hidden."""
        start = self.request.committed
        output = self._target_pass(start, num_rows)
        self.state.commit(self.request, num_rows)
        if self.model.draft is not None and output.target_hidden is not None:
            positions = torch.arange(start, start + num_rows, device=self.device)
            rows = self.model.draft.context_rows(output.target_hidden, positions)
            keep_context(self.state, [Span(self.request, start, num_rows)], rows)
        return self.model.target.logits(output.hidden).cpu(), _on_host(output.target_hidden)

    def _target_pass(self, start: int, num_rows: int) -> TargetOutput:
        stop = start + num_rows
        token_ids = torch.tensor(self.token_ids[start:stop], device=self.device)
        tokens = PassTokens(token_ids, self._ngrams(start, stop))
        return self.model.target(tokens, PassView(self.state, [next_span(self.request, num_rows)]))

    def _ngrams(self, start: int, stop: int) -> Tensor | None:
        """[rows, n]: each row's token and its predecessors, -1 before the start."""
        plan = self.model.plan.ngrams
        if plan is None:
            return None
        back = range(plan.max_ngram)
        rows = [[self.token_ids[p - b] if p >= b else -1 for b in back] for p in range(start, stop)]
        return torch.tensor(rows, device=self.device)

    def draft(self, draft: DsparkDraft, anchor: int) -> tuple[Tensor, Tensor, Tensor]:
        """One greedy draft block after the committed rows: ids [G + 1], logits [G, V], confidence [G]."""
        block = draft.plan.block_size
        previous = torch.tensor([anchor], device=self.device)
        view = DraftView(self.state, [next_span(self.request, block)])
        output = draft(draft.block_tokens(previous), view, self.model.target)
        base = self.model.target.logits(output.normed)
        ids, logits, confidence = [previous], [], []
        for k in range(block):
            corrected = base[k : k + 1] + draft.markov_bias(previous)
            confidence.append(draft.confidence_logits(output.hidden[k : k + 1], previous))
            previous = corrected.argmax(-1)
            ids.append(previous)
            logits.append(corrected)
        return torch.cat(ids).cpu(), torch.cat(logits).cpu(), torch.cat(confidence).cpu()

    def engram_hash_ids(self) -> Tensor | None:
        """[T, layers, columns] table rows that the passes looked up."""
        if not self.hashes:
            return None
        return torch.stack([torch.cat(self.hashes[layer]) for layer in sorted(self.hashes)], dim=1).cpu()
