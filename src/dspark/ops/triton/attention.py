"""Attention of a row over its own gathered keys, in segments of keys at fixed numbers.

Each segment has a softmax of its own; segments are joined one after the other, starting from the sink. Either one
program goes through a row's segments, or programs of their own leave them to be joined by another kernel: both do the
same operations in the same order, so the choice sets the speed and never the bits. A segment without keys is passed
over, so an index may be padded at its end by any amount; a missing key inside a segment adds an exact zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.attention import Sources, Turn
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16
from dspark.ops.triton.launch import INTERPRETED, block_of, new_output, packed, rounded
from dspark.ops.triton.rope import turn_pairs

_BLOCK_HEADS = 16
_SEGMENT = {torch.bfloat16: 64, torch.float32: 32}
_WIDE_HEAD, _WIDE_WARPS = 512, 8
_FEW_REGISTERS = 128
# Rows whose segments are programs of their own; more fill the device with a program a row and block of heads.
_FEW_ROWS = 32
_MOST_SEGMENT_BYTES = 256 * 2**20


@triton.jit
def _queries(
    q, places, inside, cos, sin, row, eps, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """[BLOCK_H, BLOCK_K] float32: heads of one row, normalised where `NORM`, turned, rounded as rows are."""
    heads = tl.load(q + places, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        heads = heads * tl.rsqrt(tl.sum(heads * heads, 1) / K + eps)[:, None]
        if ROUND:
            heads = round_bf16(heads, PLAIN)
    heads = turn_pairs(heads, cos + row * ROPE, sin + row * ROPE, 1.0, K, ROPE, BLOCK_H, BLOCK_K)
    return round_bf16(heads, PLAIN) if ROUND else heads


@triton.jit
def _keys(rows, key, K: tl.constexpr, BLOCK_K: tl.constexpr, WORKING: tl.constexpr):
    """[SEGMENT, BLOCK_K] of the keys at places [SEGMENT]; zero where there is none."""
    lanes = tl.arange(0, BLOCK_K)
    inside = (key >= 0)[:, None] & (lanes < K)[None, :]
    return tl.load(rows + key[:, None] * K + lanes[None, :], mask=inside, other=0.0).to(WORKING)


@triton.jit
def _segment(queries, keys, key, scale):
    """Softmax of a segment of keys, -1 where there is none: its top, its total and weighted sum."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where((key >= 0)[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp(scores - top[:, None])
    return top, tl.sum(weights, 1), tl.dot(weights.to(queries.dtype), keys, input_precision="ieee")


@triton.jit
def _join(top, total, acc, own_top, own_total, own):
    """Add a segment to those before it; written as single operations, which no compiler joins in another way."""
    best = tl.maximum(top, own_top)
    kept, share = tl.exp(top - best), tl.exp(own_top - best)
    total = tl.fma(total, kept, own_total * share)
    kept, share = tl.broadcast_to(kept[:, None], acc.shape), tl.broadcast_to(share[:, None], acc.shape)
    return best, total, tl.fma(acc, kept, own * share)


@triton.jit
def _join_keys(
    queries, top, total, acc, rows, index, J, scale, K: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Join all segments of one store's keys of one row."""
    for start in range(0, J, SEGMENT):
        places = start + tl.arange(0, SEGMENT)
        key = tl.load(index + places, mask=places < J, other=-1)
        if tl.max(key, 0) >= 0:
            own_top, own_total, own = _segment(queries, _keys(rows, key, K, BLOCK_K, queries.dtype), key, scale)
            top, total, acc = _join(top, total, acc, own_top, own_total, own)
    return top, total, acc


@triton.jit
def _store_found(
    out, places, inside, cos, sin, row, total, acc, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Divide by the denominator, turn back, and store."""
    found = acc / total[:, None]
    if ROUND:
        found = round_bf16(found, PLAIN)
    found = turn_pairs(found, cos + row * ROPE, sin + row * ROPE, -1.0, K, ROPE, BLOCK_H, BLOCK_K)
    tl.store(out + places, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_near", "num_far"])
def _attend(
    q, cos, sin, near, near_index, num_near, far, far_index, num_far, sink, out, scale, eps,
    H: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_FAR: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, WORKING: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """One program a row and block of heads."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_K)
    inside = (heads < H)[:, None] & (lanes < K)[None, :]
    places = (row * H + heads)[:, None] * K + lanes[None, :]
    begin(EARLY)
    queries = _queries(q, places, inside, cos, sin, row, eps, K, ROPE, BLOCK_H, BLOCK_K, NORM, ROUND, PLAIN)
    queries = queries.to(WORKING)
    top = tl.load(sink + heads, mask=heads < H, other=0.0)
    total = tl.full([BLOCK_H], 1.0, dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_K], dtype=tl.float32)
    top, total, acc = _join_keys(
        queries, top, total, acc, near, near_index + row * num_near, num_near, scale, K, SEGMENT, BLOCK_K
    )
    if HAS_FAR:
        top, total, acc = _join_keys(
            queries, top, total, acc, far, far_index + row * num_far, num_far, scale, K, SEGMENT, BLOCK_K
        )
    _store_found(out, places, inside, cos, sin, row, total, acc, K, ROPE, BLOCK_H, BLOCK_K, ROUND, PLAIN)


@triton.jit
def _leave_segment(
    q, places, inside, cos, sin, row, eps, rows, key, tops, totals, values, left, heads, scale, H: tl.constexpr,
    K: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    ROUND: tl.constexpr, WORKING: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Keys are on their way while the queries are made ready."""
    keys = _keys(rows, key, K, BLOCK_K, WORKING)
    queries = _queries(q, places, inside, cos, sin, row, eps, K, ROPE, BLOCK_H, BLOCK_K, NORM, ROUND, PLAIN)
    top, total, own = _segment(queries.to(WORKING), keys, key, scale)
    tl.store(values + places, own, mask=inside)
    tl.store(tops + left, top, mask=heads < H)
    tl.store(totals + left, total, mask=heads < H)


@triton.jit(do_not_specialize=["num_near", "num_far", "near_segments", "segments"])
def _attend_segment(
    q, cos, sin, near, near_index, num_near, far, far_index, num_far, tops, totals, values, near_segments, segments,
    scale, eps, H: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_FAR: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, WORKING: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """One program a row, block of heads and segment; a segment without keys leaves a top of -inf and nothing else."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    segment = tl.program_id(2)
    lanes = tl.arange(0, BLOCK_K)
    inside = (heads < H)[:, None] & (lanes < K)[None, :]
    places = (row * H + heads)[:, None] * K + lanes[None, :]
    left = (row * H + heads) * segments + segment
    is_near = segment < near_segments
    number = tl.where(is_near, segment, segment - near_segments) * SEGMENT + tl.arange(0, SEGMENT)
    begin(EARLY)
    key = tl.load(near_index + row * num_near + number, mask=number < tl.where(is_near, num_near, 0), other=-1)
    if HAS_FAR:
        far_key = tl.load(far_index + row * num_far + number, mask=number < tl.where(is_near, 0, num_far), other=-1)
        key = tl.maximum(key, far_key)
    if tl.max(key, 0) < 0:
        tl.store(tops + left, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=heads < H)
        return
    values += segment.to(tl.int64) * (tl.num_programs(0) * H * K)
    if is_near:
        _leave_segment(
            q, places, inside, cos, sin, row, eps, near, key, tops, totals, values, left, heads, scale, H, K, ROPE,
            BLOCK_H, BLOCK_K, NORM, ROUND, WORKING, PLAIN,
        )  # fmt: skip
    else:
        _leave_segment(
            q, places, inside, cos, sin, row, eps, far, key, tops, totals, values, left, heads, scale, H, K, ROPE,
            BLOCK_H, BLOCK_K, NORM, ROUND, WORKING, PLAIN,
        )  # fmt: skip


@triton.jit
def _left(tops, totals, values, segment, last, step, inside):
    """What a segment of one row and head left; where it has no keys the top is -inf and the rest was never set."""
    segment = segment + tl.arange(0, 1)
    known = segment <= last
    top = tl.load(tops + segment, mask=known, other=float("-inf"))
    total = tl.load(totals + segment, mask=known, other=0.0)
    return top, total, tl.load(values + segment[:, None] * step, mask=known[:, None] & inside, other=0.0)


@triton.jit
def _join_left(top, total, acc, own_top, own_total, part):
    """Join a segment to those before it if it has keys."""
    exists = own_top > float("-inf")
    next_top, next_total, next_acc = _join(top, total, acc, own_top, own_total, part)
    acc = tl.where(exists[:, None], next_acc, acc)
    return tl.where(exists, next_top, top), tl.where(exists, next_total, total), acc


@triton.jit(do_not_specialize=["segments"])
def _join_segments(
    tops, totals, values, cos, sin, sink, out, segments, H: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """One program a row and head joins the segments that `_attend_segment` left."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    lanes = tl.arange(0, BLOCK_K)
    places = (row * H + head)[:, None] * K + lanes[None, :]
    inside = (lanes < K)[None, :]
    own = (row * H + head) * segments
    step = tl.num_programs(0).to(tl.int64) * H * K
    begin(EARLY)
    every = tl.arange(0, BLOCK_S)
    left = tl.load(tops + (row * H + tl.program_id(1)) * segments + every, mask=every < segments, other=float("-inf"))
    last = tl.max(tl.where(left > float("-inf"), every, -1), 0)
    top = tl.load(sink + head)
    total = tl.full([1], 1.0, dtype=tl.float32)
    acc = tl.zeros([1, BLOCK_K], dtype=tl.float32)
    for start in range(0, last + 1, 4):
        # Four are on their way before the first is joined.
        top0, total0, part0 = _left(tops + own, totals + own, values + places, start, last, step, inside)
        top1, total1, part1 = _left(tops + own, totals + own, values + places, start + 1, last, step, inside)
        top2, total2, part2 = _left(tops + own, totals + own, values + places, start + 2, last, step, inside)
        top3, total3, part3 = _left(tops + own, totals + own, values + places, start + 3, last, step, inside)
        top, total, acc = _join_left(top, total, acc, top0, total0, part0)
        top, total, acc = _join_left(top, total, acc, top1, total1, part1)
        top, total, acc = _join_left(top, total, acc, top2, total2, part2)
        top, total, acc = _join_left(top, total, acc, top3, total3, part3)
    _store_found(out, places, inside, cos, sin, row, total, acc, K, ROPE, 1, BLOCK_K, ROUND, PLAIN)


def attend(
    q: Tensor, turn: Turn, sources: Sources, sink: Tensor, scale: float, norm_eps: float | None = None
) -> Tensor:
    """See `dspark.ops.attention.attend_of`; one or two sources."""
    num_rows, num_heads, size = q.shape
    out = new_output(q, *q.shape)
    if not num_rows:
        return rounded(out, q)
    (near, near_index), (far, far_index) = sources[0], sources[-1]
    narrow = not INTERPRETED and all(x.dtype == torch.bfloat16 for x in (q, near, far))
    segment = _SEGMENT[torch.bfloat16 if narrow else torch.float32]
    counts = [triton.cdiv(index.shape[1], segment) for _, index in sources]
    cos, sin, sink = packed(turn[0]), packed(turn[1]), packed(sink)
    early, is_rounded = early_launch(), q.dtype == torch.bfloat16
    keys = packed(near), packed(near_index), near_index.shape[1], packed(far), packed(far_index), far_index.shape[1]
    head_blocks, block_k = triton.cdiv(num_heads, _BLOCK_HEADS), block_of(size, least=16)
    # The same for both ways, because a sum over keys is taken in the order in which warps hold them.
    options = {"num_warps": _WIDE_WARPS if block_k >= _WIDE_HEAD else 4, "launch_pdl": early}
    # Two programs then fit where one would.
    narrowed = options | {"maxnreg": _FEW_REGISTERS} if early else options
    form = (
        num_heads, size, cos.shape[-1], _BLOCK_HEADS, segment, block_k, len(sources) > 1, norm_eps is not None,
        is_rounded, tl.bfloat16 if narrow else tl.float32, early, INTERPRETED,
    )  # fmt: skip
    if not _is_split(num_rows, sum(counts), num_heads * size):
        _attend[(num_rows, head_blocks)](
            packed(q), cos, sin, *keys, sink, out, scale, norm_eps or 0.0, *form, **options
        )
        return rounded(out, q)
    tops, totals = q.new_empty(2, num_rows, num_heads, sum(counts), dtype=torch.float32)
    values = q.new_empty(sum(counts), *q.shape, dtype=torch.float32)
    _attend_segment[(num_rows, head_blocks, sum(counts))](
        packed(q), cos, sin, *keys, tops, totals, values, counts[0], sum(counts), scale, norm_eps or 0.0, *form,
        **narrowed,
    )  # fmt: skip
    _join_segments[(num_rows, num_heads)](
        tops, totals, values, cos, sin, sink, out, sum(counts), num_heads, size, cos.shape[-1], block_of(sum(counts)),
        block_k, is_rounded, early, INTERPRETED, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return rounded(out, q)


def _is_split(num_rows: int, segments: int, row_size: int) -> bool:
    """Whether segments are programs of their own."""
    return segments > 1 and num_rows <= _FEW_ROWS and 4 * num_rows * segments * row_size <= _MOST_SEGMENT_BYTES
