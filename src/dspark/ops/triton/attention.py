"""Attention of a row over its own gathered keys: one program a row and group of heads, keys in index order.

The softmax runs along the keys and starts from the sink. A chunk without keys is passed over, so an index may be padded
at its end by any amount; a missing key inside a chunk adds an exact zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import INTERPRETED, block_of, new_output, packed, rounded

_BLOCK_HEADS = 16
_BLOCK_KEYS = {torch.bfloat16: 64, torch.float32: 32}


@triton.jit
def _add_keys(
    q, top, total, acc, rows, index, first, J, scale, K: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Continue the running softmax over one store's keys of one row."""
    lanes = tl.arange(0, BLOCK_K)
    for start in range(0, J, BLOCK_J):
        places = start + tl.arange(0, BLOCK_J)
        key = tl.load(index + first + places, mask=places < J, other=-1)
        if tl.max(key, 0) >= 0:
            exists = key >= 0
            keys = tl.load(
                rows + key[:, None] * K + lanes[None, :], mask=exists[:, None] & (lanes < K)[None, :], other=0.0
            ).to(q.dtype)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(exists[None, :], scores, float("-inf"))
            best = tl.maximum(top, tl.max(scores, 1))
            kept = tl.exp(top - best)
            weights = tl.exp(scores - best[:, None])
            total = total * kept + tl.sum(weights, 1)
            acc = acc * kept[:, None] + tl.dot(weights.to(q.dtype), keys, input_precision="ieee")
            top = best
    return top, total, acc


@triton.jit(do_not_specialize=["num_near", "num_far"])
def _attend(
    q,
    near,
    near_index,
    num_near,
    far,
    far_index,
    num_far,
    sink,
    out,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_FAR: tl.constexpr,
    WORKING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_K)
    inside = (heads < H)[:, None] & (lanes < K)[None, :]
    places = (row * H + heads)[:, None] * K + lanes[None, :]
    queries = tl.load(q + places, mask=inside, other=0.0).to(WORKING)
    top = tl.load(sink + heads, mask=heads < H, other=0.0)
    total = tl.full([BLOCK_H], 1.0, dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_K], dtype=tl.float32)
    top, total, acc = _add_keys(
        queries, top, total, acc, near, near_index, row * num_near, num_near, scale, K, BLOCK_J, BLOCK_K
    )
    if HAS_FAR:
        top, total, acc = _add_keys(
            queries, top, total, acc, far, far_index, row * num_far, num_far, scale, K, BLOCK_J, BLOCK_K
        )
    tl.store(out + places, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def sparse_attention(q: Tensor, sources: list[tuple[Tensor, Tensor]], sink: Tensor, scale: float) -> Tensor:
    """See `dspark.ops.attention.sparse_attention`; one or two sources."""
    num_rows, num_heads, size = q.shape
    out = new_output(q, *q.shape)
    if not num_rows:
        return rounded(out, q)
    (near, near_index), (far, far_index) = sources[0], sources[-1]
    narrow = not INTERPRETED and all(x.dtype == torch.bfloat16 for x in (q, near, far))
    working = torch.bfloat16 if narrow else torch.float32
    block_h = _BLOCK_HEADS
    _attend[(num_rows, triton.cdiv(num_heads, block_h))](
        packed(q),
        packed(near),
        packed(near_index),
        near_index.shape[1],
        packed(far),
        packed(far_index),
        far_index.shape[1],
        packed(sink),
        out,
        scale,
        num_heads,
        size,
        block_h,
        _BLOCK_KEYS[working],
        block_of(size, least=16),
        len(sources) > 1,
        tl.bfloat16 if narrow else tl.float32,
        num_warps=4,
    )
    return rounded(out, q)
