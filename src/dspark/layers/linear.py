"""Linear maps and norms with their parameters."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dspark.layers.plans import Storage
from dspark.ops.experts import Output
from dspark.ops.opset import OpSet
from dspark.ops.packing import Weight, join_weights


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised float32 parameter that holds stored values."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T without bias; the input is quantised by the caller, once for all maps that share it."""

    def __init__(self, in_size: int, out_size: int, storage: Storage, ops: OpSet) -> None:
        super().__init__()
        self.weight = parameter(out_size, in_size)
        self.storage = storage
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in_size] -> [T, out_size]."""
        return self.ops.linear(x, self.ops.stored(self.weight, self.storage))

    def terms(self, x: Tensor) -> Output:
        """The same as what a half gives: a last sum may be left to its reader."""
        return self.ops.linear_terms(x, self.ops.stored(self.weight, self.storage))


class GroupedLinear(Linear):
    """Linear maps of equal parts: part g of the input's columns gives part g of the output's.

    `quant_group` columns of the output share a scale; with 0 it is not quantised.
    """

    def __init__(
        self, in_size: int, out_size: int, groups: int, quant_group: int, storage: Storage, ops: OpSet
    ) -> None:
        super().__init__(in_size // groups, out_size, storage, ops)
        self.groups = groups
        self.quant_group = quant_group

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in_size] -> [T, out_size]."""
        return self.ops.grouped_linear(x, self.ops.stored(self.weight, self.storage), self.groups, self.quant_group)


class LinearGroup:
    """Linear maps that read the same rows: one product for all of them, with the columns of each after the other's.

    The maps belong to their modules; `join` may make their weights parts of one, where products read them as stored.
    """

    def __init__(self, maps: Sequence[Linear], ops: OpSet) -> None:
        self.maps = tuple(maps)
        self.ops = ops
        self.joined: Weight | None = None

    def join(self) -> None:
        """Put the weights together, where their storage allows it."""
        joined = join_weights([one.weight for one in self.maps])
        if joined is not None:
            self.joined, parts = joined
            for one, part in zip(self.maps, parts, strict=True):
                cast(Any, one).weight = nn.Parameter(part, requires_grad=False) if isinstance(part, Tensor) else part

    def share(self, other: "LinearGroup") -> None:
        """Read the weight that another group over the same weights has put together."""
        self.joined = other.joined

    def column(self, one: Linear) -> int:
        """The first column of a map's results."""
        widths = [other.weight.shape[-2] for other in self.maps]
        return sum(widths[: self.maps.index(one)])

    def sums(self, x: Tensor) -> Tensor:
        """x: [T, in_size] -> sums [sections, T, N], see `dspark.ops.kept_rows`."""
        if self.joined is not None:
            return self.ops.joint_sums(x, [self.joined])
        return self.ops.joint_sums(x, [self.ops.stored(one.weight, one.storage) for one in self.maps])


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float, ops: OpSet) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size], same shape out."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Token embeddings."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] int64 -> [T, size] float32."""
        return self.weight[token_ids]
