"""Fake quantisers chosen once from plans."""

from collections.abc import Callable

import torch
from torch import Tensor

from dspark.layers.plans import CacheQuantPlan, QuantPlan
from dspark.ops.opset import OpSet

Quantiser = Callable[[Tensor], Tensor]


def activation_quantiser(plan: QuantPlan, ops: OpSet) -> Quantiser:
    """Quantiser in front of quantised weights; the identity where no weight is quantised."""
    if plan.block == 0:
        return lambda x: x
    return lambda x: ops.quantise_fp8(x, plan.block)


def cache_quantiser(plan: CacheQuantPlan, rope_dim: int, ops: OpSet) -> Quantiser:
    """Quantiser of cached rows [.., K]; the rope tail passes through where the plan says so."""
    quantise = {"fp8": ops.quantise_fp8, "fp4": ops.quantise_fp4, "fp4_e4m3": ops.quantise_fp4_e4m3}[plan.kind]
    if not plan.skip_rope:
        return lambda x: quantise(x, plan.group)
    return lambda x: torch.cat((quantise(x[..., :-rope_dim], plan.group), x[..., -rope_dim:]), dim=-1)
