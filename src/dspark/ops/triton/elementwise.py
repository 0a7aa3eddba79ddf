"""Functions of single values inside kernels, sums over sections, and the gated activation of the experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import packed

_BLOCK = 256


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of a float32 block."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def round_bf16(x, PLAIN: tl.constexpr):
    """Nearest bf16 value of a float32 block, ties to even; the interpreter's own conversion truncates."""
    if PLAIN:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def order_key(x):
    """int32 values in the order of float32 ones, which a warp compares in one instruction; the two zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def section_sum(parts, places, known, step, SECTIONS: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr):
    """Sum over sections from first to last, `step` elements apart, rounded as a linear map's result is."""
    total = tl.load(parts + places, mask=known, other=0.0).to(tl.float32)
    for section in tl.static_range(1, SECTIONS):
        total += tl.load(parts + section * step.to(tl.int64) + places, mask=known, other=0.0).to(tl.float32)
    return round_bf16(total, PLAIN) if ROUND else total


@triton.jit
def gated(gate, up, limit, HAS_LIMIT: tl.constexpr):
    """silu(gate) * up of float32 blocks; gate clamped from above and up on both sides."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * sigmoid(gate) * up


@triton.jit
def _gate(x, out, limit, F: tl.constexpr, BLOCK: tl.constexpr, HAS_LIMIT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < F
    gate = tl.load(x + row * 2 * F + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + lanes, gated(gate, up, limit, HAS_LIMIT), mask=inside)


def gate_and_up(projected: Tensor, limit: float) -> Tensor:
    """See `dspark.ops.experts.gate_and_up`; rows [T, 2F]."""
    num_rows, size = projected.shape[0], projected.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=torch.float32, device=projected.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, _BLOCK))
        _gate[grid](packed(projected), out, limit, size, _BLOCK, limit > 0, num_warps=1)
    return out
