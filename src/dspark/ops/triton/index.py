"""Scores of compressed rows: one program a query and chunk of keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.index import SCORE_CHUNK, IndexKeys
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import section_sum
from dspark.ops.triton.launch import INTERPRETED, block_of, packed


@triton.jit(do_not_specialize=["width"])
def _score(
    q, sums, keys, places, owners, out, width, scale, N: tl.constexpr, COLUMN: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, SECTIONS: tl.constexpr,
    WORKING: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    step = tl.num_programs(0).to(tl.int64) * N
    begin(EARLY)
    place = tl.load(places + tl.load(owners + row) * width + chunk)
    heads, lanes = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
    some = (lanes < K)[None, :]
    queries = tl.load(q + (row * H + heads)[:, None] * K + lanes[None, :], mask=(heads < H)[:, None] & some, other=0.0)
    rows = tl.load(keys + place[:, None] * K + lanes[None, :], mask=(place >= 0)[:, None] & some, other=0.0)
    product = tl.dot(queries.to(WORKING), tl.trans(rows.to(WORKING)), input_precision="ieee")
    weight = section_sum(sums, row * N + COLUMN + heads, heads < H, step, SECTIONS, ROUND, PLAIN) * scale
    scores = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    tl.store(out + row * width + chunk, scores)


def index_scores(q: Tensor, sums: Tensor, column: int, keys: IndexKeys) -> Tensor:
    """See `dspark.ops.index.index_scores`."""
    num_rows, num_heads, size = q.shape
    width = keys.places.shape[1]
    out = torch.empty(num_rows, width, dtype=torch.float32, device=q.device)
    narrow = not INTERPRETED and q.dtype == keys.rows.dtype == torch.bfloat16
    if num_rows:
        early = early_launch()
        _score[(num_rows, width // SCORE_CHUNK)](
            packed(q), packed(sums), packed(keys.rows), packed(keys.places), packed(keys.owners), out, width,
            size**-0.5 * num_heads**-0.5, sums.shape[2], column, num_heads, size, block_of(num_heads, least=16),
            block_of(size, least=16), SCORE_CHUNK, sums.shape[0], tl.bfloat16 if narrow else tl.float32,
            q.dtype == torch.bfloat16, early, INTERPRETED, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out
