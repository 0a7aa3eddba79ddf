"""Draws without a sort and without a wait: one walk over the row by many programs, then one over what they found."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.draw import NUM_WORDS, DrawKind, DrawParams
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.filters import TILE, Cuts, distances, find_cuts, is_kept
from dspark.ops.triton.launch import INTERPRETED, block_of, unbroken
from dspark.ops.triton.noise import gumbel, stream_key

_WORDS = tl.constexpr(NUM_WORDS)
_MOST_FILTERED = 64


class DrawnRows(NamedTuple):
    """owners, positions: [T] int64, contiguous. words: [N, 6] int64 of the requests."""

    owners: Tensor
    positions: Tensor
    words: Tensor


@triton.jit
def noise_key(words, owner, position):
    """(key of the noise, temperature) of rows that belong to requests `owner`."""
    words += tl.maximum(owner, 0) * _WORDS
    temperature = tl.load(words + 3).to(tl.float64, bitcast=True).to(tl.float32)
    return stream_key(tl.load(words), position, tl.load(words + 1)), temperature


@triton.jit
def best_of(values, ids):
    """(largest value, its id) along the first axis; ties to the lower id."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == tl.expand_dims(best, 0), ids, 2**31 - 1), 0)


@triton.jit(do_not_specialize=["V"])
def _best_of_tiles(
    logits, maxima, cuts, owners, positions, words, values, ids, V, STRIDE,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, SAMPLED: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The best noisy logit of each tile of a row, among those that the cuts keep where there are any."""
    begin(EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < V
    noisy = tl.load(logits + row * STRIDE + columns, mask=inside, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        owner = tl.load(owners + row)
        key, temperature = noise_key(words, owner, tl.load(positions + row))
        noisy += temperature * gumbel(key, columns, PLAIN)
        if cuts is not None:
            own = words + tl.maximum(owner, 0) * _WORDS
            distance, is_likely = distances(logits, maxima, own, row, columns, inside, STRIDE, PARTS, BLOCK)
            noisy = tl.where(is_likely & is_kept(distance, columns, cuts, row), noisy, float("-inf"))
    best, place = best_of(noisy, columns)
    tl.store(values + row * TILES + tile, best)
    tl.store(ids + row * TILES + tile, place)


@triton.jit
def _best_of_rows(values, ids, tokens, V, STRIDE, TILES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The token of each row out of the bests of its tiles."""
    begin(EARLY)
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    found = tl.load(values + row * TILES + lanes, mask=lanes < TILES, other=float("-inf"))
    places = tl.load(ids + row * TILES + lanes, mask=lanes < TILES, other=2**31 - 1)
    _, token = best_of(found, places)
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


def best_tokens(logits: Tensor) -> Tensor:
    """See `dspark.ops.draw.best_tokens`."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        take_best(*_bests(unbroken(logits)), tokens, logits.shape[1])
    return tokens


def draw_rows(logits: Tensor, owners: Tensor, positions: Tensor, params: DrawParams, kind: DrawKind) -> Tensor:
    """See `dspark.ops.draw.draw_rows`."""
    if kind is DrawKind.GREEDY:
        return best_tokens(logits)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if not logits.shape[0]:
        return tokens
    logits, rows = unbroken(logits), DrawnRows(owners.contiguous(), positions.contiguous(), params.words)
    if kind is DrawKind.FILTERED:
        draw_filtered(logits, rows, _bests(logits)[0], tokens)
    else:
        take_best(*_bests(logits, rows), tokens, logits.shape[1])
    return tokens


def draw_filtered(logits: Tensor, rows: DrawnRows, maxima: Tensor, tokens: Tensor) -> None:
    """Draw rows with filters into tokens [T], which may be strided; `maxima` as for `find_cuts`.

    Many rows take their turns, so that the lists of a call stay small beside its logits.
    """
    for first in range(0, logits.shape[0], _MOST_FILTERED):
        part = slice(first, first + _MOST_FILTERED)
        own = DrawnRows(rows.owners[part], rows.positions[part], rows.words)
        cuts = find_cuts(logits[part], maxima[part], own.owners, rows.words)
        take_best(*_bests(logits[part], own, cuts), tokens[part], logits.shape[1])


def _bests(logits: Tensor, rows: DrawnRows | None = None, cuts: Cuts | None = None) -> tuple[Tensor, Tensor]:
    """Values and ids [T, tiles] of the best logits of tiles; noisy ones where it is said how rows are drawn."""
    num_rows, vocab_size = logits.shape
    tiles, early = triton.cdiv(vocab_size, TILE), early_launch()
    values, ids = new_tiles(num_rows, tiles, logits.device)
    maxima, cut, parts = (cuts.maxima, cuts.cuts, cuts.maxima.shape[1]) if cuts else (None, None, 1)
    _best_of_tiles[(num_rows, tiles)](
        logits, maxima, cut, *(rows or (None, None, None)), values, ids, vocab_size, logits.stride(0), parts,
        block_of(parts), tiles, TILE, rows is not None, early, INTERPRETED, num_warps=4, launch_pdl=early,
        enable_fp_fusion=False,
    )  # fmt: skip
    return values, ids
