"""Log-probabilities of rows as plain numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.engine.request import TokenLogprob
from dspark.sampling import logprobs


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
