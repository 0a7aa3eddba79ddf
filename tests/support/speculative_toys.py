"""Toy target, toy drafter and the smallest engine loop, for tests of sampling and speculation without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.sampling import RequestSampling
from dspark.speculative import DraftBlock, ProposalRequest, Proposer, VerifySpan, verify


class ToyTarget:
    """Logits that depend on the last two tokens and on the length of the text."""

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self._table = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * scale
        self._phase = torch.randn(5, vocab_size, generator=generator) * 0.3

    def rows(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [N, V] of the tokens after N texts."""
        pairs = torch.tensor([[text[-2] if len(text) > 1 else 0, text[-1], len(text) % 5] for text in texts])
        return self._table[pairs[:, 0], pairs[:, 1]] + self._phase[pairs[:, 2]]

    def row(self, text: Sequence[int]) -> Tensor:
        """Logits [V] of the token after one text."""
        return self.rows([text])[0]


class ToyDraftModel:
    """Drafter whose base logits see the anchor only; the Markov bias is one table. Counts what it was asked."""

    def __init__(
        self, vocab_size: int, block_size: int, seed: int = 1, *, has_markov: bool = True, padding: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        width = vocab_size + padding
        self._base = torch.randn(vocab_size, block_size, width, generator=generator)
        self._base[:, :, vocab_size:] = 50.0
        self._markov = torch.randn(vocab_size, width, generator=generator) if has_markov else None
        self._hidden = torch.randn(vocab_size, block_size, 3, generator=generator)
        self.forgotten: list[object] = []

    def draft_block(self, requests: Sequence[ProposalRequest]) -> DraftBlock:
        """Base logits and hidden rows from the anchors."""
        anchors = torch.tensor([request.anchor_id for request in requests])
        return DraftBlock(self._base[anchors], self._hidden[anchors])

    def markov_bias(self, prev_ids: Tensor) -> Tensor | None:
        """Bias row of the previous token."""
        return None if self._markov is None else self._markov[prev_ids]

    def confidence_logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
        """Any function of both inputs."""
        return hidden.sum(-1) + prev_ids.float() * 0.25

    def forget(self, request_id: object) -> None:
        """Remember who was forgotten."""
        self.forgotten.append(request_id)


def row_texts(span: VerifySpan) -> list[list[int]]:
    """Texts before the tokens that the rows [anchor, *draft_ids] predict."""
    return [[*span.sampling.history, *span.draft_ids[:k]] for k in range(span.num_rows)]


def generate(
    target: ToyTarget,
    requests: Sequence[tuple[SamplingParams, Sequence[int]]],
    num_tokens: int,
    proposer: Proposer,
    *,
    choose: Callable[[int, int, int], int] | None = None,
    method: str = "standard",
) -> list[list[int]]:
    """Run rounds until every request has `num_tokens` new tokens; cut there.

    Args:
        target: the toy target.
        requests: (params, prompt); request id is the index.
        num_tokens: tokens per request.
        proposer: any drafter.
        choose: (round, request, width) -> verify_len; default everything.
        method: rejection_sample_method.
    """
    texts = [list(prompt) for _, prompt in requests]
    samplings = [
        RequestSampling(params, len(prompt), text) for (params, prompt), text in zip(requests, texts, strict=True)
    ]
    round_index = 0
    while True:
        running = [i for i, (_, prompt) in enumerate(requests) if len(texts[i]) < len(prompt) + num_tokens]
        if not running:
            break
        proposal = proposer.propose([ProposalRequest(i, samplings[i]) for i in running])
        spans = []
        for slot, i in enumerate(running):
            width = proposal.width if choose is None else choose(round_index, i, proposal.width)
            drafts = proposal.token_ids[slot, :width].tolist()
            probabilities = None if proposal.draft_probabilities is None else proposal.draft_probabilities[slot]
            spans.append(VerifySpan(i, samplings[i], drafts, probabilities))
        logits = target.rows([text for span in spans for text in row_texts(span)])
        verdict = verify(logits, spans, rejection_sample_method=method)
        for i, tokens in zip(running, verdict.token_ids, strict=True):
            texts[i].extend(tokens)
        round_index += 1
    return [text[len(prompt) : len(prompt) + num_tokens] for text, (_, prompt) in zip(texts, requests, strict=True)]
