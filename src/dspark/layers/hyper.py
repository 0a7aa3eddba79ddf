"""Hyper-connection halves: how a half reads its input from the residual streams and writes its output back."""

from functools import lru_cache

import torch
from torch import Tensor, nn

from dspark.layers.linear import RMSNorm, parameter
from dspark.layers.plans import HyperPlan
from dspark.ops.hyper import HalfInput, Residual, written_streams
from dspark.ops.opset import OpSet


class HalfMix(nn.Module):
    """The mix of one half (attention or feed-forward) of a block; its input is quantised in groups of `group`."""

    def __init__(self, plan: HyperPlan, hidden_size: int, group: int, ops: OpSet) -> None:
        super().__init__()
        size = plan.num_streams
        self.plan = plan
        self.group = group
        self.ops = ops
        self.fn = parameter((2 + size) * size, size * hidden_size)
        self.base = parameter((2 + size) * size)
        self.scale = parameter(3)

    def forward(self, residual: Residual, norm: RMSNorm) -> HalfInput:
        """Input of the half and what takes its output; `norm` is that of the collapsed row."""
        plan = self.plan
        return self.ops.read_streams(
            residual,
            plan.shifted,
            self.fn,
            self.scale,
            self.base,
            norm.weight,
            plan.iterations,
            plan.eps,
            plan.norm_eps,
            norm.eps,
            self.group,
        )


class HeadMix(nn.Module):
    """Final collapse with weights of its own."""

    def __init__(self, plan: HyperPlan, hidden_size: int, ops: OpSet) -> None:
        super().__init__()
        self.plan = plan
        self.ops = ops
        self.fn = parameter(plan.num_streams, plan.num_streams * hidden_size)
        self.base = parameter(plan.num_streams)
        self.scale = parameter(1)

    def forward(self, residual: Residual, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """[T, D] collapsed, and normalised by `norm`; the carried pre-weights are not used."""
        plan = self.plan
        return self.ops.read_head(
            residual, self.fn, self.scale, self.base, norm.weight, plan.eps, plan.norm_eps, norm.eps
        )


class CarriedCollapse(nn.Module):
    """Final collapse with the pre-weights of the last feed-forward half."""

    def __init__(self, ops: OpSet) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, residual: Residual, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """[T, D] collapsed, and normalised by `norm`."""
        hidden = self.ops.collapse_streams(written_streams(residual, self.ops.expand_streams), residual.carried)
        return hidden, norm(hidden)


def embedded(weight: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype, ops: OpSet) -> Residual:
    """What the first half of a model reads: the rows of an embedding in every stream, and stream 0 to collapse to."""
    streams = ops.embed_streams(weight, token_ids, num_streams, dtype)
    return Residual(streams, _first_stream(num_streams, streams.device).expand(streams.shape[0], -1))


@lru_cache(maxsize=16)
def _first_stream(num_streams: int, device: torch.device) -> Tensor:
    """Pre-weights [S] that select stream 0; kept for passes that are differentiated, too."""
    with torch.inference_mode(False):
        weights = torch.zeros(num_streams, device=device)
        weights[0] = 1.0
    return weights
