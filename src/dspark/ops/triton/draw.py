"""Draws without a sort and without a wait: one walk over the row by many programs, then one over what they found."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.draw import NUM_WORDS, DrawKind, DrawParams, filtered
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import INTERPRETED, block_of
from dspark.ops.triton.noise import gumbel, stream_key

_TILE = 1024
_WORDS = tl.constexpr(NUM_WORDS)


@triton.jit
def noise_key(words, owner, position):
    """(key of the noise, temperature) of rows that belong to requests `owner`."""
    words += tl.maximum(owner, 0) * _WORDS
    temperature = tl.load(words + 3).to(tl.float64, bitcast=True).to(tl.float32)
    return stream_key(tl.load(words), position, tl.load(words + 1)), temperature


@triton.jit
def best_of(values, ids, AXIS: tl.constexpr):
    """(largest value, its id) along an axis; ties to the lower id."""
    best = tl.max(values, AXIS)
    is_best = values == (best if AXIS is None else tl.expand_dims(best, AXIS))
    return best, tl.min(tl.where(is_best, ids, 2**31 - 1), AXIS)


@triton.jit(do_not_specialize=["V"])
def _best_of_tiles(
    logits, excluded, owners, positions, words, values, ids, V, STRIDE,
    TILES: tl.constexpr, TILE: tl.constexpr, SAMPLED: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The best noisy logit of each tile of a row."""
    begin(EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < V
    noisy = tl.load(logits + row * STRIDE + columns, mask=inside, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        key, temperature = noise_key(words, tl.load(owners + row), tl.load(positions + row))
        noisy += temperature * gumbel(key, columns, PLAIN)
    if excluded is not None:
        is_out = tl.load(excluded + row * V + columns, mask=inside, other=1) != 0
        noisy = tl.where(is_out, float("-inf"), noisy)
    best, place = best_of(noisy, columns, 0)
    tl.store(values + row * TILES + tile, best)
    tl.store(ids + row * TILES + tile, place)


@triton.jit
def _best_of_rows(values, ids, tokens, V, STRIDE, TILES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The token of each row out of the bests of its tiles."""
    begin(EARLY)
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    found = tl.load(values + row * TILES + lanes, mask=lanes < TILES, other=float("-inf"))
    places = tl.load(ids + row * TILES + lanes, mask=lanes < TILES, other=2**31 - 1)
    _, token = best_of(found, places, 0)
    # A row of numbers that are none still names a token that exists.
    tl.store(tokens + row * STRIDE, tl.minimum(token, V - 1).to(tl.int64))


def take_best(values: Tensor, ids: Tensor, tokens: Tensor, vocab_size: int) -> None:
    """tokens [T], which may be strided, out of the bests of tiles [T, tiles] float32 and their ids int32."""
    num_rows, tiles = values.shape
    early, block = early_launch(), block_of(tiles)
    _best_of_rows[(num_rows,)](
        values, ids, tokens, vocab_size, tokens.stride(0), tiles, block, early, num_warps=4 if block > 256 else 1,
        launch_pdl=early,
    )  # fmt: skip


def new_tiles(num_rows: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the bests of tiles: values and ids."""
    values = torch.empty(num_rows, tiles, dtype=torch.float32, device=device)
    return values, torch.empty(num_rows, tiles, dtype=torch.int32, device=device)


def draw_rows(logits: Tensor, owners: Tensor, positions: Tensor, params: DrawParams, kind: DrawKind) -> Tensor:
    """See `dspark.ops.draw.draw_rows`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    excluded = None
    if kind is DrawKind.FILTERED:
        excluded = filtered(logits.to(torch.float32), params.of_rows(owners)) == -torch.inf
    tiles, early = triton.cdiv(vocab_size, _TILE), early_launch()
    values, ids = new_tiles(num_rows, tiles, logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    owners, positions = owners.contiguous(), positions.contiguous()
    _best_of_tiles[(num_rows, tiles)](
        logits, excluded, owners, positions, params.words, values, ids, vocab_size, logits.stride(0), tiles, _TILE,
        kind is not DrawKind.GREEDY, early, INTERPRETED, num_warps=4, launch_pdl=early, enable_fp_fusion=False,
    )  # fmt: skip
    take_best(values, ids, tokens, vocab_size)
    return tokens
