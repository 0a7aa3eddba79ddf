"""Pooling of a group of rows: each channel walks the group in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import packed

_BLOCK = 128


@triton.jit
def _pool(values, gates, out, M, K: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < K
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for member in range(M):
        top = tl.maximum(top, tl.load(gates + (group * M + member) * K + lanes, mask=inside, other=0.0))
    total = tl.zeros([BLOCK], dtype=tl.float32)
    pooled = tl.zeros([BLOCK], dtype=tl.float32)
    for member in range(M):
        places = (group * M + member) * K + lanes
        weight = tl.exp(tl.load(gates + places, mask=inside, other=0.0) - top)
        total += weight
        pooled += weight * tl.load(values + places, mask=inside, other=0.0)
    tl.store(out + group * K + lanes, pooled / total, mask=inside)


def pool_groups(values: Tensor, gates: Tensor) -> Tensor:
    """See `dspark.ops.compress.pool_groups`."""
    num_groups, members, size = values.shape
    out = torch.empty(num_groups, size, dtype=torch.float32, device=values.device)
    if num_groups:
        grid = (num_groups, triton.cdiv(size, _BLOCK))
        _pool[grid](packed(values), packed(gates), out, members, size, _BLOCK, num_warps=4)
    return out
