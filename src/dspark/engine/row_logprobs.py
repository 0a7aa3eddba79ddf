"""Rows of logits told apart by what they are for, and their log-probabilities as plain numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.engine.request import TokenLogprob
from dspark.sampling import logprobs


def split_rows(logits: Tensor, counts: Sequence[tuple[int, int]]) -> tuple[list[Tensor], Tensor]:
    """Rows that only say how likely a prompt is, and rows that decide tokens.

    Args:
        logits: [T, V] of a pass, spans one after the other.
        counts: for each span how many rows of the first kind it has, and how many of the second after them.
    Returns:
        for each span its prompt rows; the deciding rows of all spans, one after the other.
    """
    parts = logits.split([prompt + deciding for prompt, deciding in counts])
    prompt_rows = [part[:prompt] for part, (prompt, _) in zip(parts, counts, strict=True)]
    if not any(prompt for prompt, _ in counts):
        return prompt_rows, logits
    return prompt_rows, torch.cat([part[prompt:] for part, (prompt, _) in zip(parts, counts, strict=True)])


def token_logprobs(logits: Tensor, token_ids: Sequence[int], count: int, num_valid_tokens: int) -> list[TokenLogprob]:
    """Log-probability of one token a row, with alternatives.

    Args:
        logits: [T, V], raw target rows.
        token_ids: [T], the token of each row.
        count: alternatives of each row.
        num_valid_tokens: real vocabulary size.
    """
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
    found = logprobs(logits, ids, count, num_valid_tokens=num_valid_tokens)
    tops = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
    pairs = [tuple(zip(ids, values, strict=True)) for ids, values in tops]
    rows = zip(found.token.tolist(), pairs, token_ids, found.rank.tolist(), strict=True)
    return [TokenLogprob(*row) for row in rows]
