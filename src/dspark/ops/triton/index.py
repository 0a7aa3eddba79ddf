"""Scores of compressed rows: one program a query and chunk of keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.index import SCORE_CHUNK, IndexKeys
from dspark.ops.triton.launch import INTERPRETED, block_of, packed


@triton.jit(do_not_specialize=["width"])
def _score(
    q,
    weights,
    keys,
    places,
    owners,
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
    place = tl.load(places + tl.load(owners + row) * width + chunk)
    heads, lanes = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
    some = (lanes < K)[None, :]
    queries = tl.load(q + (row * H + heads)[:, None] * K + lanes[None, :], mask=(heads < H)[:, None] & some, other=0.0)
    rows = tl.load(keys + place[:, None] * K + lanes[None, :], mask=(place >= 0)[:, None] & some, other=0.0)
    product = tl.dot(queries.to(WORKING), tl.trans(rows.to(WORKING)), input_precision="ieee")
    weight = tl.load(weights + row * H + heads, mask=heads < H, other=0.0)
    scores = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    tl.store(out + row * width + chunk, scores)


def index_scores(q: Tensor, weights: Tensor, keys: IndexKeys) -> Tensor:
    """See `dspark.ops.index.index_scores`."""
    num_rows, num_heads, size = q.shape
    width = keys.places.shape[1]
    out = torch.empty(num_rows, width, dtype=torch.float32, device=q.device)
    narrow = not INTERPRETED and q.dtype == keys.rows.dtype == torch.bfloat16
    if num_rows:
        _score[(num_rows, width // SCORE_CHUNK)](
            packed(q),
            packed(weights),
            packed(keys.rows),
            packed(keys.places),
            packed(keys.owners),
            out,
            width,
            num_heads,
            size,
            block_of(num_heads, least=16),
            block_of(size, least=16),
            SCORE_CHUNK,
            tl.bfloat16 if narrow else tl.float32,
            num_warps=4,
        )
    return out
