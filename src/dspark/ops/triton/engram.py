"""The gate of an Engram layer: one program a row and stream."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.elementwise import sigmoid
from dspark.ops.triton.launch import block_of, packed, warps_of


@triton.jit
def _gate(streams, key, weight, out, eps, root, S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    wide = tl.load(streams + row * D + lanes, mask=inside, other=0.0).to(tl.float32)
    keys = tl.load(key + row * D + lanes, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + (row % S) * D + lanes, mask=inside, other=0.0)
    product = tl.sum(wide * (factor * keys), 0)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps) * tl.rsqrt(tl.sum(keys * keys, 0) / D + eps)
    logit = product * rstd * root
    size = tl.sqrt(tl.maximum(tl.abs(logit), 1e-6))
    signed = tl.where(logit > 0, size, tl.where(logit < 0, -size, 0.0))
    tl.store(out + row, sigmoid(signed))


def engram_gate(streams: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `dspark.ops.engram.engram_gate`."""
    num_rows, num_streams, size = streams.shape
    out = torch.empty(num_rows, num_streams, dtype=torch.float32, device=streams.device)
    if num_rows:
        block = block_of(size)
        _gate[(num_rows * num_streams,)](
            packed(streams),
            packed(key),
            packed(weight),
            out,
            eps,
            size**-0.5,
            num_streams,
            size,
            block,
            num_warps=warps_of(block),
        )
    return out
