"""Mixture of experts: a router, routed experts and the shared expert."""

import torch
from torch import Tensor, nn

from dspark.layers.linear import Linear, parameter
from dspark.layers.plans import MoePlan, QuantPlan, Storage
from dspark.layers.quantisers import activation_quantiser
from dspark.ops.experts import Output
from dspark.ops.opset import OpSet
from dspark.ops.route import Route


class Router(nn.Module):
    """Scores of experts by a gate."""

    def __init__(self, plan: MoePlan, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.weight = parameter(plan.num_experts, plan.hidden_size)

    def route(self, x: Tensor, bias: Tensor | None, given: tuple[Tensor, Tensor] | None) -> Route:
        """The route of rows x [T, D]: by biased scores, or to the experts that a table gives to their tokens."""
        plan = self.plan
        numbers = plan.topk, plan.normalise, plan.sum_eps, plan.scaling
        return self.ops.route_rows(x, self.weight, bias, given, *numbers, plan.held)


class ScoreRouter(Router):
    """Experts by biased score."""

    def __init__(self, plan: MoePlan, ops: OpSet) -> None:
        super().__init__(plan, ops)
        self.bias = parameter(plan.num_experts)

    def forward(self, x: Tensor, token_ids: Tensor) -> Route:
        """x: [T, D], token_ids: [T] -> the route of each row."""
        return self.route(x, self.bias, None)


class HashRouter(Router):
    """Experts by token id, weights by score."""

    tid2eid: Tensor

    def __init__(self, plan: MoePlan, ops: OpSet) -> None:
        super().__init__(plan, ops)
        self.register_buffer("tid2eid", torch.zeros(plan.hash_vocab_size, plan.topk, dtype=torch.int64))

    def forward(self, x: Tensor, token_ids: Tensor) -> Route:
        """x: [T, D], token_ids: [T] -> the route of each row."""
        return self.route(x, None, (self.tid2eid, token_ids))


class RoutedExperts(nn.Module):
    """Stacked weights of the routed experts that are here; gate (w1) and up (w3) share one matrix."""

    def __init__(self, plan: MoePlan, storage: Storage) -> None:
        super().__init__()
        self.held = plan.held_experts
        self.w13 = parameter(len(self.held), 2 * plan.inner_size, plan.hidden_size)
        self.w2 = parameter(len(self.held), plan.hidden_size, plan.inner_size)
        self.storage = storage


class SharedExpert(nn.Module):
    """Weights of the expert that every row passes through."""

    def __init__(self, plan: MoePlan, quant: QuantPlan, ops: OpSet) -> None:
        super().__init__()
        self.w13 = Linear(plan.hidden_size, 2 * plan.shared_size, quant.dense, ops)
        self.w2 = Linear(plan.shared_size, plan.hidden_size, quant.dense, ops)


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
        self.group = quant.block

    def forward(self, x: Tensor, quantised: Tensor, token_ids: Tensor) -> Output:
        """x: [T, D] and the same quantised, token_ids: [T] -> [T, D]."""
        stored, experts, shared = self.ops.stored, self.experts, self.shared_experts
        routed = stored(experts.w13, experts.storage), stored(experts.w2, experts.storage)
        weights = stored(shared.w13.weight, shared.w13.storage), stored(shared.w2.weight, shared.w2.storage)
        numbers = self.plan.limit, self.quantise, self.group
        beside = self.ops.shared_expert(quantised, weights, *numbers)
        return self.ops.mixture(quantised, self.gate(x, token_ids), routed, beside, *numbers)
