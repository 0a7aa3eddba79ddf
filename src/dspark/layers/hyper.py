"""Hyper-connection halves: how a half reads its input from the residual streams and writes its output back."""

import torch
from torch import Tensor, nn

from dspark.layers.linear import RMSNorm, parameter
from dspark.layers.plans import HyperPlan
from dspark.ops.hyper import StreamMix, head_mix
from dspark.ops.opset import OpSet


class HalfMix(nn.Module):
    """The mix of one half (attention or feed-forward) of a block."""

    def __init__(self, plan: HyperPlan, hidden_size: int, ops: OpSet) -> None:
        super().__init__()
        size = plan.num_streams
        self.plan = plan
        self.ops = ops
        self.fn = parameter((2 + size) * size, size * hidden_size)
        self.base = parameter((2 + size) * size)
        self.scale = parameter(3)

    def forward(self, streams: Tensor, carried: Tensor, norm: RMSNorm) -> tuple[Tensor, StreamMix]:
        """Input of the half and the mix that writes back.

        Args:
            streams: [T, S, D]. carried: [T, S] pre-weights that the half before computed.
            norm: of the collapsed input.
        Returns:
            normalised input [T, D] and this half's own mix.
        """
        plan = self.plan
        return self.ops.read_streams(
            streams,
            carried if plan.shifted else None,
            self.fn,
            self.scale,
            self.base,
            norm.weight,
            plan.iterations,
            plan.eps,
            plan.norm_eps,
            norm.eps,
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

    def forward(self, streams: Tensor, carried: Tensor) -> Tensor:
        """[T, S, D] -> [T, D]; the carried pre-weights are not used."""
        flat = streams.flatten(1).float()
        logits = self.ops.linear(flat, self.fn) * self.ops.stream_rstd(flat, self.plan.norm_eps)
        return self.ops.collapse_streams(streams, head_mix(logits, self.scale, self.base, self.plan.eps))


class CarriedCollapse(nn.Module):
    """Final collapse with the pre-weights of the last feed-forward half."""

    def __init__(self, ops: OpSet) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, streams: Tensor, carried: Tensor) -> Tensor:
        """[T, S, D], [T, S] -> [T, D]."""
        return self.ops.collapse_streams(streams, carried)


def first_stream(num_rows: int, num_streams: int, device: torch.device) -> Tensor:
    """Pre-weights [T, S] that select stream 0: what the first half of a model is fed with."""
    weights = torch.zeros(num_rows, num_streams, device=device)
    weights[:, 0] = 1.0
    return weights
