"""The draft's light heads on the device: two launches a token, one for the confidences of whole blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.draw import DrawKind, DrawParams
from dspark.ops.markov import MarkovHead, draw_blocks_of
from dspark.ops.triton.draw import DrawnRows, best_of, draw_filtered, draw_rows, new_tiles, noise_key, take_best
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16
from dspark.ops.triton.launch import INTERPRETED, block_of, unbroken
from dspark.ops.triton.linear import linear
from dspark.ops.triton.noise import gumbel
from dspark.ops.triton.product_blocks import add_products

_COLUMNS, _STEP, _STAGES, _WARPS = 128, 128, 2, 4
_CONFIDENCE_BLOCK = 1024


@triton.jit
def _bf16_part(x, PLAIN: tl.constexpr):
    """(the nearest bf16 value of a float32 block, what it leaves)."""
    if PLAIN:
        part = round_bf16(x, PLAIN)
        return part, x - part
    part = x.to(tl.bfloat16)
    return part, x - part.to(tl.float32)


@triton.jit
def _add_parts(w, x, first, second, third, PLAIN: tl.constexpr):
    """Add the products of the three bf16 parts of float32 rows to their sums."""
    w = w.to(tl.float32) if PLAIN else w
    part, rest = _bf16_part(x.to(tl.float32), PLAIN)
    first = add_products(w, part, first, PLAIN)
    part, rest = _bf16_part(rest, PLAIN)
    second = add_products(w, part, second, PLAIN)
    part, _ = _bf16_part(rest, PLAIN)
    return first, second, add_products(w, part, third, PLAIN)


@triton.jit(do_not_specialize=["R", "V", "k"])
def _draw_step(
    base, weight, embed, previous, positions, words, corrected, values, ids, R, V, k, BASE_ROW, BASE_STEP,
    PREVIOUS_STRIDE, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, SAMPLED: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """The best noisy logit of each tile of columns for token `k` of the blocks; without noise also all logits.

    The bias is the product of float32 rows of `embed` with bf16 rows of `weight`, as linear maps take it: rows are
    taken apart into three bf16 ones and so used exactly, and the sums are added smallest first.
    """
    begin(EARLY)
    rows, tile = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    if BACK:  # every second token begins with the columns that the one before it left in the cache
        tile = TILES - 1 - tile
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < R
    lanes = tl.arange(0, STEP)
    weights = weight + tile.to(tl.int64) * (COLUMNS * K) + (tl.arange(0, COLUMNS)[:, None] * K + lanes[None, :])
    is_column = (columns < N)[:, None]
    known = (columns < V)[:, None] & inside[None, :]
    places = base + rows[None, :] * BASE_ROW + k * BASE_STEP + columns[:, None]
    noisy = tl.load(places, mask=known, other=float("-inf"))
    before = tl.load(previous + rows * PREVIOUS_STRIDE, mask=inside, other=0)
    embedded = embed + before[:, None] * K + lanes[None, :]
    first = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    second = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    third = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        deep = (start + lanes < K)[None, :]
        w = tl.load(weights + start, mask=is_column & deep, other=0.0)
        x = tl.load(embedded + start, mask=inside[:, None] & deep, other=0.0)
        first, second, third = _add_parts(w, x, first, second, third, PLAIN)
    noisy += (third + second) + first
    if corrected is not None:
        tl.store(corrected + rows[None, :] * V + columns[:, None], noisy, mask=known)
    if SAMPLED:
        position = tl.load(positions + rows, mask=inside, other=0) + k
        key, temperature = noise_key(words, tl.where(inside, rows, 0), position)
        noisy += temperature[None, :] * gumbel(key[None, :], columns[:, None], PLAIN)
    best, place = best_of(noisy, columns[:, None])
    tl.store(values + rows * TILES + tile, best, mask=inside)
    tl.store(ids + rows * TILES + tile, place, mask=inside)


_draw_token_by_token = draw_blocks_of(linear, draw_rows)


def draw_blocks(
    base: Tensor, anchors: Tensor, positions: Tensor, head: MarkovHead, params: DrawParams, kind: DrawKind
) -> Tensor:
    """See `dspark.ops.markov.draw_blocks_of`; float32 weights take the loop that is written there."""
    if head.weight.dtype != torch.bfloat16 or not base.numel():
        return _draw_token_by_token(base, anchors, positions, head, params, kind)
    num_blocks, width, vocab_size = base.shape
    tokens = torch.empty(num_blocks, width, dtype=torch.int64, device=base.device)
    tiles, early = triton.cdiv(vocab_size, _COLUMNS), early_launch()
    rows = 8 if num_blocks <= 8 else 16
    values, ids = new_tiles(num_blocks, tiles, base.device)
    owners = corrected = None
    if kind is DrawKind.FILTERED:
        owners = torch.arange(num_blocks, device=base.device)
        corrected = torch.empty(num_blocks, vocab_size, dtype=torch.float32, device=base.device)
    base, previous, positions = unbroken(base), anchors, positions.contiguous()
    for k in range(width):
        _draw_step[(triton.cdiv(num_blocks, rows), tiles)](
            base, head.weight, head.embed, previous, positions, params.words, corrected, values, ids, num_blocks,
            vocab_size, k, base.stride(0), base.stride(1), previous.stride(0), *head.weight.shape, tiles, rows,
            _COLUMNS, _STEP, _STAGES, kind is DrawKind.SAMPLED, k % 2 == 1, early, INTERPRETED,
            num_warps=_WARPS, launch_pdl=early, enable_fp_fusion=False,
        )  # fmt: skip
        previous = tokens[:, k]
        if owners is None or corrected is None:
            take_best(values, ids, previous, vocab_size)
        else:
            draw_filtered(corrected, DrawnRows(owners, positions + k, params.words), values, previous)
    return tokens


@triton.jit
def _confidence(
    hidden, previous, embed, weight, out, HIDDEN_STRIDE, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        inside = start + lanes < D
        x = tl.load(hidden + row * HIDDEN_STRIDE + start + lanes, mask=inside, other=0.0).to(tl.float32)
        sums += x * tl.load(weight + start + lanes, mask=inside, other=0.0).to(tl.float32)
    lanes = tl.arange(0, BLOCK_K)
    x = tl.load(embed + tl.load(previous + row) * K + lanes, mask=lanes < K, other=0.0).to(tl.float32)
    products = x * tl.load(weight + D + lanes, mask=lanes < K, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(sums, 0) + tl.sum(products, 0))


def confidence_logits(hidden: Tensor, previous_ids: Tensor, embed: Tensor, weight: Tensor) -> Tensor:
    """See `dspark.ops.markov.confidence_logits_of`."""
    num_rows, depth = hidden.shape
    hidden = unbroken(hidden)
    out = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    if num_rows:
        early, rank = early_launch(), embed.shape[1]
        _confidence[(num_rows,)](
            hidden, previous_ids.contiguous(), embed, weight, out, hidden.stride(0), depth, rank,
            min(block_of(depth), _CONFIDENCE_BLOCK), block_of(rank), early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out
