"""Choice of experts: square root of softplus scores, a bias that only selects, ties to the lower expert."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.ops.elementwise import softplus
from dspark.ops.linear import linear_wide


class Route(NamedTuple):
    """Chosen experts [T, k] int64 and their weights [T, k] float32.

    `held` are the experts whose weights are here, in the order of the stacks; None where all are. Others are left out.
    `groups` are the pairs (row, slot) as a twin's experts read them, where they were grouped on the way.
    """

    expert_ids: Tensor
    weights: Tensor
    held: range | None = None
    groups: tuple[Tensor, ...] | None = None


def route_scores(logits: Tensor) -> Tensor:
    """Scores [T, E] float32 of gate logits [T, E]."""
    return softplus(logits).sqrt()


def choose_experts(scores: Tensor, bias: Tensor, count: int) -> Tensor:
    """The `count` experts with the highest biased score, best first: [T, count] int64."""
    return torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :count]


def route_rows_of(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Route]:
    """Routing of rows by a gate whose product is that of one set of twins."""

    def route_rows(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        given: tuple[Tensor, Tensor] | None,
        count: int,
        normalise: bool,
        sum_eps: float,
        scaling: float,
        held: range | None = None,
    ) -> Route:
        """The route of rows.

        Args:
            x: [T, D]. weight: [E, D] of the gate.
            bias: [E], added to the scores of a choice. given: table [V, count] and tokens [T], whose rows name the
                experts where nothing is chosen.
            normalise: weights sum to `scaling`, up to `sum_eps`. held: see `Route`.
        """
        scores = route_scores(product(x, weight))
        if given is None:
            assert bias is not None
            expert_ids = choose_experts(scores, bias, count)
        else:
            expert_ids = given[0][given[1]]
        return weigh_experts(scores, expert_ids, normalise, sum_eps, scaling)._replace(held=held)

    return route_rows


route_rows = route_rows_of(linear_wide)


def weigh_experts(scores: Tensor, expert_ids: Tensor, normalise: bool, sum_eps: float, scaling: float) -> Route:
    """Weights from the unbiased scores of the chosen experts, normalised to sum to `scaling` where asked."""
    weights = scores.gather(1, expert_ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + sum_eps)
    return Route(expert_ids, weights * scaling)
