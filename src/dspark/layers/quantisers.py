"""Fake quantisation chosen once from plans."""

from collections.abc import Callable

from torch import Tensor

from dspark.layers.plans import CacheQuantPlan, QuantPlan
from dspark.ops.kept_rows import RowForm
from dspark.ops.opset import OpSet

Quantiser = Callable[[Tensor], Tensor]


def activation_quantiser(plan: QuantPlan, ops: OpSet) -> Quantiser:
    """Quantiser in front of quantised weights; the identity where no weight is quantised."""
    if plan.block == 0:
        return lambda x: x
    return lambda x: ops.quantise_fp8(x, plan.block)


def activation_form(plan: QuantPlan) -> RowForm:
    """The same as the form of a row."""
    return RowForm("fp8", plan.block) if plan.block else RowForm("none", 0)


def cache_form(plan: CacheQuantPlan, rope_dim: int, hadamard: bool = False) -> RowForm:
    """Form of cached rows; the rotated tail passes through where the plan says so."""
    return RowForm(plan.kind, plan.group, rope_dim if plan.skip_rope else 0, hadamard)
