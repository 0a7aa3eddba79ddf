"""Choice of experts: square root of softplus scores, a bias that only selects, ties to the lower expert."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.elementwise import softplus


class Route(NamedTuple):
    """Chosen experts [T, k] int64 and their weights [T, k] float32.

    `held` are the experts whose weights are here, in the order of the stacks; None where all are. Others are left out.
    """

    expert_ids: Tensor
    weights: Tensor
    held: range | None = None


def route_scores(logits: Tensor) -> Tensor:
    """Scores [T, E] float32 of gate logits [T, E]."""
    return softplus(logits).sqrt()


def choose_experts(scores: Tensor, bias: Tensor, count: int) -> Tensor:
    """The `count` experts with the highest biased score, best first: [T, count] int64."""
    return torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :count]


def route_rows(
    logits: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor | None,
    count: int,
    normalise: bool,
    sum_eps: float,
    scaling: float,
) -> Route:
    """The route of rows from their gate logits [T, E] float32: experts by biased score, or given [T, count]."""
    scores = route_scores(logits)
    if expert_ids is None:
        assert bias is not None
        expert_ids = choose_experts(scores, bias, count)
    return weigh_experts(scores, expert_ids, normalise, sum_eps, scaling)


def weigh_experts(scores: Tensor, expert_ids: Tensor, normalise: bool, sum_eps: float, scaling: float) -> Route:
    """Weights from the unbiased scores of the chosen experts, normalised to sum to `scaling` where asked."""
    weights = scores.gather(1, expert_ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + sum_eps)
    return Route(expert_ids, weights * scaling)
