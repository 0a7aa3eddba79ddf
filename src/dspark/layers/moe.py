"""Mixture of experts: a router, routed experts and the shared expert."""

import torch
from torch import Tensor, nn

from dspark.layers.linear import Linear, parameter
from dspark.layers.plans import MoePlan, QuantPlan, Storage
from dspark.layers.quantisers import Quantiser, activation_quantiser
from dspark.ops.opset import OpSet
from dspark.ops.route import Route, route_scores


class Router(nn.Module):
    """Scores of experts by a gate."""

    def __init__(self, plan: MoePlan, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.weight = parameter(plan.num_experts, plan.hidden_size)

    def scores(self, x: Tensor) -> Tensor:
        """x: [T, D] -> [T, E] float32."""
        return route_scores(self.ops.linear_wide(x, self.weight))

    def weigh(self, scores: Tensor, expert_ids: Tensor) -> Route:
        """Weights of the chosen experts."""
        plan = self.plan
        return self.ops.weigh_experts(scores, expert_ids, plan.normalise, plan.sum_eps, plan.scaling)


class ScoreRouter(Router):
    """Experts by biased score."""

    def __init__(self, plan: MoePlan, ops: OpSet) -> None:
        super().__init__(plan, ops)
        self.bias = parameter(plan.num_experts)

    def forward(self, x: Tensor, token_ids: Tensor) -> Route:
        """x: [T, D], token_ids: [T] -> the route of each row."""
        scores = self.scores(x)
        return self.weigh(scores, self.ops.choose_experts(scores, self.bias, self.plan.topk))


class HashRouter(Router):
    """Experts by token id, weights by score."""

    tid2eid: Tensor

    def __init__(self, plan: MoePlan, ops: OpSet) -> None:
        super().__init__(plan, ops)
        self.register_buffer("tid2eid", torch.zeros(plan.hash_vocab_size, plan.topk, dtype=torch.int64))

    def forward(self, x: Tensor, token_ids: Tensor) -> Route:
        """x: [T, D], token_ids: [T] -> the route of each row."""
        return self.weigh(self.scores(x), self.tid2eid[token_ids])


class RoutedExperts(nn.Module):
    """Stacked weights of the routed experts; gate (w1) and up (w3) share one matrix."""

    def __init__(self, plan: MoePlan, storage: Storage) -> None:
        super().__init__()
        self.w13 = parameter(plan.num_experts, 2 * plan.inner_size, plan.hidden_size)
        self.w2 = parameter(plan.num_experts, plan.hidden_size, plan.inner_size)
        self.storage = storage


class SharedExpert(nn.Module):
    """The expert that every row passes through."""

    def __init__(self, plan: MoePlan, quant: QuantPlan, ops: OpSet) -> None:
        super().__init__()
        self.limit = plan.limit
        self.ops = ops
        self.w13 = Linear(plan.hidden_size, 2 * plan.inner_size, quant.dense, ops)
        self.w2 = Linear(plan.inner_size, plan.hidden_size, quant.dense, ops)

    def forward(self, x: Tensor, quantise: Quantiser) -> Tensor:
        """x: [T, D] quantised -> [T, D]."""
        return self.w2(quantise(self.ops.gate_and_up(self.w13(x), self.limit).to(x.dtype)))


class MixtureOfExperts(nn.Module):
    """Routed sum in float32, shared expert added last."""

    def __init__(self, plan: MoePlan, quant: QuantPlan, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.gate: nn.Module = HashRouter(plan, ops) if plan.hash_vocab_size else ScoreRouter(plan, ops)
        self.experts = RoutedExperts(plan, quant.experts)
        self.shared_experts = SharedExpert(plan, quant, ops)
        self.quantise = activation_quantiser(quant, ops)

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """x: [T, D], token_ids: [T] -> [T, D]."""
        route = self.gate(x, token_ids)
        quantised = self.quantise(x)
        w13 = self.ops.stored(self.experts.w13, self.experts.storage)
        w2 = self.ops.stored(self.experts.w2, self.experts.storage)
        total = self.ops.routed_experts(quantised, route, w13, w2, self.plan.limit, self.quantise)
        return (total + self.shared_experts(quantised, self.quantise)).to(x.dtype)
