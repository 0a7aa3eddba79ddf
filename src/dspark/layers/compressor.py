"""Compression of token rows into one row per group, with the open group's inputs kept in the state."""

import torch
from torch import Tensor, nn

from dspark.layers.linear import Linear, RMSNorm, parameter
from dspark.layers.plans import CompressorPlan, Storage
from dspark.layers.state_view import StateView
from dspark.ops.opset import OpSet


class Compressor(nn.Module):
    """Pools each completed group and normalises it; rope and quantisation are the caller's."""

    def __init__(self, plan: CompressorPlan, hidden_size: int, norm_eps: float, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.wkv = Linear(hidden_size, plan.projected_width, Storage.BF16, ops)
        if plan.has_gate:
            self.wgate = Linear(hidden_size, plan.projected_width, Storage.BF16, ops)
        if plan.position_bias:
            self.ape = parameter(plan.ratio, plan.projected_width)
        self.norm = RMSNorm(plan.width, norm_eps, ops)

    def forward(self, x: Tensor, view: StateView, key: str) -> Tensor:
        """x: [T, D] -> compressed rows [C, width] of the groups that this pass completes."""
        values = self.wkv(x)
        if not self.plan.has_gate:
            return self.norm(values[: view.group_positions(1).shape[0]])
        gates = self.wgate(x).float()
        if self.plan.position_bias:
            gates = gates + self.ape[view.positions % self.plan.ratio]
        inputs, exists = view.group_inputs(
            key, torch.cat((values.float(), gates), dim=-1), self.plan.ratio, self.plan.reach
        )
        values, gates = inputs.chunk(2, dim=-1)
        gates = gates.masked_fill(~exists.unsqueeze(-1), float("-inf"))
        if self.plan.overlap:
            values, gates = self._join_halves(values), self._join_halves(gates)
        return self.norm(self.ops.pool_groups(values, gates).to(x.dtype))

    def _join_halves(self, rows: Tensor) -> Tensor:
        """[C, 2M, 2K] -> [C, 2M, K]: the previous group gives its first channels, the own group its second."""
        ratio, width = self.plan.ratio, self.plan.width
        return torch.cat((rows[:, :ratio, :width], rows[:, ratio:, width:]), dim=1)
