"""Engram's gate and what it adds to the streams: one program a row and stream."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16, sigmoid
from dspark.ops.triton.launch import INTERPRETED, block_of, new_output, packed, rounded, warps_of


@triton.jit
def _add(
    streams, projected, q_weight, k_weight, out, eps, root,
    S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    factor = tl.load(q_weight + stream * D + lanes, mask=inside, other=0.0)
    factor *= tl.load(k_weight + stream * D + lanes, mask=inside, other=0.0)
    begin(EARLY)
    places = (row * S + stream) * D + lanes
    wide = tl.load(streams + places, mask=inside, other=0.0).to(tl.float32)
    projected += row * (S + 1) * D + lanes
    keys = tl.load(projected + stream * D, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(projected + S * D, mask=inside, other=0.0).to(tl.float32)
    product = tl.sum(wide * (factor * keys), 0)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps) * tl.rsqrt(tl.sum(keys * keys, 0) / D + eps)
    logit = product * rstd * root
    size = tl.sqrt(tl.maximum(tl.abs(logit), 1e-6))
    found = wide + sigmoid(tl.where(logit > 0, size, tl.where(logit < 0, -size, 0.0))) * value
    if ROUND:
        found = round_bf16(found, PLAIN)
    tl.store(out + places, found.to(out.dtype.element_ty), mask=inside)


def engram_add(streams: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """See `dspark.ops.engram.engram_add`."""
    num_rows, num_streams, size = streams.shape
    out = new_output(streams, *streams.shape)
    if num_rows:
        block, early = block_of(size), early_launch()
        _add[(num_rows, num_streams)](
            packed(streams), packed(projected), packed(q_weight), packed(k_weight), out, eps, size**-0.5,
            num_streams, size, block, streams.dtype == torch.bfloat16, early, INTERPRETED, num_warps=warps_of(block),
            launch_pdl=early,
        )  # fmt: skip
    return rounded(out, streams)
