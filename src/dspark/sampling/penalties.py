"""Logit bias and the three penalties, as tensors that follow the tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.sampling.rows import RowSampling, changes_logits


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Logit bias and penalties of the rows that have any, as tensors.

    Attributes:
        rows: [P] int64, indices into the batch.
        bias: ([N] index into `rows`, [N] token ids, [N] float32 values) or None.
        repetition, presence, frequency: [P, 1] float32.
        seen: [P, V] bool, ids in prompt or output; None when no row has a penalty.
        output_counts: [P, V] float32, occurrences in the output; None likewise.
    """

    rows: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seen: Tensor | None
    output_counts: Tensor | None

    @classmethod
    def build(cls, rows: Sequence[RowSampling], vocab_size: int, device: torch.device) -> Adjustments | None:
        """Collect the rows whose parameters change logits; None when there are none."""
        chosen = [i for i, row in enumerate(rows) if changes_logits(row.params)]
        if not chosen:
            return None
        params = [rows[i].params for i in chosen]
        penalised = any(one.has_penalties for one in params)
        counts = _count_tokens([rows[i] for i in chosen], vocab_size, device) if penalised else None
        column = torch.tensor(
            [[one.repetition_penalty, one.presence_penalty, one.frequency_penalty] for one in params],
            dtype=torch.float32,
            device=device,
        )
        return cls(
            rows=torch.tensor(chosen, dtype=torch.int64, device=device),
            bias=_bias_entries(params, vocab_size, device),
            repetition=column[:, 0:1],
            presence=column[:, 1:2],
            frequency=column[:, 2:3],
            seen=counts[0] if counts else None,
            output_counts=counts[1] if counts else None,
        )

    def advance(self, token_ids: Tensor) -> Adjustments:
        """Count one more output token [T] per batch row."""
        if self.seen is None or self.output_counts is None:
            return self
        ids = token_ids[self.rows, None]
        one = torch.ones_like(ids, dtype=torch.float32)
        return replace(
            self,
            seen=self.seen.scatter(1, ids, True),
            output_counts=self.output_counts.scatter_add(1, ids, one),
        )


def _bias_entries(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Flatten the logit biases; ids outside the vocabulary have nothing to change. A request is read once."""
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    index, tokens, values = [], [], []
    for i, one in enumerate(params):
        if not one.logit_bias:
            continue
        if id(one) not in shared:
            ids = torch.tensor(list(one.logit_bias.keys()), dtype=torch.int64)
            added = torch.tensor(list(one.logit_bias.values()), dtype=torch.float32)
            known = ids < vocab_size
            shared[id(one)] = ids[known], added[known]
        ids, added = shared[id(one)]
        index.append(torch.full_like(ids, i))
        tokens.append(ids)
        values.append(added)
    if not index:
        return None
    return torch.cat(index).to(device), torch.cat(tokens).to(device), torch.cat(values).to(device)


def _count_tokens(rows: Sequence[RowSampling], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (seen [P, V] bool, output counts [P, V] float32); rows of one request share one count."""
    shared: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    counts = torch.empty(len(rows), vocab_size, dtype=torch.int64)
    seen = torch.empty(len(rows), vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        key = (id(row.history), row.prompt_len)
        if key not in shared:
            ids = torch.tensor(row.history, dtype=torch.int64)
            prompt = _histogram(ids[: row.prompt_len], vocab_size)
            output = _histogram(ids[row.prompt_len :], vocab_size)
            shared[key] = (prompt + output > 0, output)
        tentative = _histogram(torch.tensor(row.tentative, dtype=torch.int64), vocab_size)
        counts[i] = shared[key][1] + tentative
        seen[i] = shared[key][0] | (tentative > 0)
    return seen.to(device), counts.to(device=device, dtype=torch.float32)


def _histogram(ids: Tensor, vocab_size: int) -> Tensor:
    """Occurrences of each id below `vocab_size`: [V] int64."""
    return torch.bincount(ids[ids < vocab_size], minlength=vocab_size)
