"""Compression of token rows into one row per group, with the open group's inputs kept in the state."""

import torch
from torch import Tensor, nn

from dspark.layers.linear import Linear, LinearGroup, RMSNorm, parameter
from dspark.layers.plans import CompressorPlan, Storage
from dspark.ops.compress import Groups, PoolShape
from dspark.ops.kept_rows import RowForm
from dspark.ops.opset import OpSet
from dspark.ops.rope import Turn


class Compressor(nn.Module):
    """Pools each completed group, normalises it and writes it in its form."""

    def __init__(self, plan: CompressorPlan, hidden_size: int, norm_eps: float, form: RowForm, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.form = form
        self.ops = ops
        self.wkv = Linear(hidden_size, plan.projected_width, Storage.BF16, ops)
        if plan.has_gate:
            self.wgate = Linear(hidden_size, plan.projected_width, Storage.BF16, ops)
        if plan.position_bias:
            self.ape = parameter(plan.ratio, plan.projected_width)
        self.norm = RMSNorm(plan.width, norm_eps, ops)

    @property
    def maps(self) -> list[Linear]:
        """Its maps of the layer's input, in the order of their columns in a joint product."""
        return [self.wkv, self.wgate] if self.plan.has_gate else [self.wkv]

    def forward(self, sums: Tensor, dtype: torch.dtype, maps: LinearGroup, groups: Groups, turn: Turn) -> Tensor:
        """Write the rows of the groups that this pass completes.

        Args:
            sums: [sections, T, N] of `maps`, for rows of `dtype`. turn: of the groups' positions.
        Returns:
            [C, width], the rows before they are turned and quantised.
        """
        plan = self.plan
        shape = PoolShape(maps.column(self.wkv), plan.width, plan.ratio, plan.overlap, plan.has_gate)
        bias = self.ape if plan.position_bias else None
        return self.ops.compress(sums, dtype, shape, bias, self.norm, turn, self.form, groups)
