"""Products in float32 whose every element is a sum of its own: slow, and exact whatever shares the call."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.route import Route
from dspark.ops.triton.elementwise import gate_and_up
from dspark.ops.triton.launch import packed

_BLOCK_N, _BLOCK_K = 32, 64


@triton.jit(do_not_specialize=["divisor"])
def _product(x, weight, expert, out, divisor, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    row = pair // divisor
    weight += tl.load(expert + pair) * N * K
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + lanes < K
        part = tl.load(x + row * K + start + lanes, mask=inside, other=0.0).to(tl.float32)
        block = tl.load(
            weight + columns[:, None].to(tl.int64) * K + (start + lanes)[None, :],
            mask=(columns < N)[:, None] & inside[None, :],
            other=0.0,
        )
        acc += block * part[None, :]
    tl.store(out + pair * N + columns, tl.sum(acc, 1), mask=columns < N)


def _pairs(x: Tensor, weight: Tensor, experts: Tensor, divisor: int) -> Tensor:
    """[P, N] float32: row pair // divisor of x [T, K] times the weight [N, K] of the pair's expert."""
    count, (_, width, depth) = experts.shape[0], weight.shape
    out = torch.empty(count, width, dtype=torch.float32, device=x.device)
    if count:
        grid = (count, triton.cdiv(width, _BLOCK_N))
        _product[grid](
            packed(x), packed(weight), packed(experts), out, divisor, width, depth, _BLOCK_N, _BLOCK_K, num_warps=4
        )
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `dspark.ops.linear.linear`; float32, not yet rounded to the dtype of `x`."""
    experts = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return _pairs(x, weight.unsqueeze(0), experts, 1)


def routed_experts(
    x: Tensor, route: Route, w13: Tensor, w2: Tensor, limit: float, quantise: Callable[[Tensor], Tensor]
) -> Tensor:
    """See `dspark.ops.experts.routed_experts`."""
    num_rows, count = route.expert_ids.shape
    held = range(w13.shape[0]) if route.held is None else route.held
    numbers = route.expert_ids.flatten() - held.start
    experts = numbers.clamp(0, len(held) - 1)
    projected = _pairs(x, w13, experts, count).to(x.dtype)
    inner = gate_and_up(projected, limit) * route.weights.reshape(-1, 1)
    placed = _pairs(quantise(inner.to(x.dtype)), w2, experts, 1).to(x.dtype).float()
    placed = torch.where((numbers == experts).unsqueeze(-1), placed, 0.0).view(num_rows, count, -1)
    total = placed[:, 0]
    for slot in range(1, count):
        total = total + placed[:, slot]
    return total
