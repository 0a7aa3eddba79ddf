"""Products by the vendor's library: often quicker, but a row's bits may depend on how many rows are beside it.

Weights that only the project's own kernels can read (`dspark.ops.packing`), and float32 rows on bf16 weights, stay with
them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.linear import grouped_linear_of
from dspark.ops.opset import OpSet

Product = Callable[[Tensor, Tensor], Tensor]


def with_library_products(ops: OpSet) -> OpSet:
    """The same ops with the library's products wherever it can read the weight."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return _product(x, weight) if _is_readable(x, weight) else ops.linear(x, weight)

    def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
        return _wide_product(x, weight) if _is_readable(x, weight) else ops.linear_wide(x, weight)

    grouped_product = grouped_linear_of(_product, ops.quantise_fp8)

    def grouped_linear(x: Tensor, weight: Tensor, groups: int, quant_group: int) -> Tensor:
        product = grouped_product if _is_readable(x, weight) else ops.grouped_linear
        return product(x, weight, groups, quant_group)

    name = f"{ops.name} with library products"
    return replace(ops, name=name, linear=linear, linear_wide=linear_wide, grouped_linear=grouped_linear)


def _is_readable(x: Tensor, weight: Tensor) -> bool:
    """Whether the library has a product that loses nothing of the weight and of the rows."""
    return isinstance(weight, Tensor) and (weight.dtype == torch.float32 or weight.dtype == x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """The same with a float32 result."""
    if x.is_cuda and weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
