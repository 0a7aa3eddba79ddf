"""Scores of compressed rows: one program a query and chunk of keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.index import SCORE_CHUNK
from dspark.ops.triton.launch import INTERPRETED, block_of, packed


@triton.jit(do_not_specialize=["width"])
def _score(
    q,
    weights,
    keys,
    out,
    width,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    WORKING: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    heads, lanes = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
    some = (lanes < K)[None, :]
    queries = tl.load(q + (row * H + heads)[:, None] * K + lanes[None, :], mask=(heads < H)[:, None] & some, other=0.0)
    rows = tl.load(keys + chunk.to(tl.int64)[:, None] * K + lanes[None, :], mask=some, other=0.0)
    product = tl.dot(queries.to(WORKING), tl.trans(rows.to(WORKING)), input_precision="ieee")
    weight = tl.load(weights + row * H + heads, mask=heads < H, other=0.0)
    scores = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    tl.store(out + row * width + chunk, scores)


def index_scores(q: Tensor, weights: Tensor, keys: list[tuple[slice, Tensor]]) -> Tensor:
    """See `dspark.ops.index.index_scores`."""
    num_heads, size = q.shape[1:]
    longest = max(rows.shape[0] for _, rows in keys)
    out = torch.zeros(q.shape[0], longest, dtype=torch.float32, device=q.device)
    q, weights = packed(q), packed(weights)
    for span, rows in keys:
        count = len(range(*span.indices(q.shape[0])))
        if not count or not rows.shape[0]:
            continue
        narrow = not INTERPRETED and q.dtype == rows.dtype == torch.bfloat16
        _score[(count, rows.shape[0] // SCORE_CHUNK)](
            packed(q[span]),
            packed(weights[span]),
            packed(rows),
            out[span],
            longest,
            num_heads,
            size,
            block_of(num_heads, least=16),
            block_of(size, least=16),
            SCORE_CHUNK,
            tl.bfloat16 if narrow else tl.float32,
            num_warps=4,
        )
    return out
