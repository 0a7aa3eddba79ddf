"""Top-k and top-p without a sort and without a wait: where the cut lies is found by bins, then among a bin's own.

A token weighs 1 for top-k and its probability mass for top-p. Tokens are counted into bins by how far they lie below
the best one; the bin in which the weight before a token reaches the limit is taken apart, and halving finds the cut.
Weights are integers, so their sums do not depend on the order in which programs add them.

Example: top-k 3 over distances 0, 0.4, 0.5, 0.5, 2 finds the bin of 0.5 with two tokens before it; one of the two that
tie is kept, which is the one with the lower id.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from dspark.ops.draw import NUM_WORDS
from dspark.ops.filters import MASS_UNIT
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import INTERPRETED, block_of

TILE = 1024
_NUM_BINS = 1024
_BINS = tl.constexpr(_NUM_BINS)
_BINS_PER_UNIT = tl.constexpr(32.0)  # beyond 32 below the best, where no mass is left, one bin holds the rest
_MASS_UNIT = tl.constexpr(MASS_UNIT)
_TO_INTEGER = tl.constexpr(2.0**52)  # above it float64 has no fractions, so adding it rounds to the nearest, even
_MOST = tl.constexpr(2**31 - 1)
_WORDS = tl.constexpr(NUM_WORDS)


@dataclass(frozen=True)
class Cuts:
    """What filters keep of T rows.

    Attributes:
        maxima: [T, tiles] float32, whose largest is the row's best logit.
        cuts: [T, 2] int32: the largest distance that is kept, as bits of a float32, and the last id at it.
    """

    maxima: Tensor
    cuts: Tensor


@triton.jit
def _real(words, COLUMN: tl.constexpr):
    return tl.load(words + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def distances(logits, maxima, words, row, columns, inside, STRIDE, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """(bits of how far logits over the temperature lie below the best, whether min-p keeps them)."""
    lanes = tl.arange(0, BLOCK)
    best = tl.max(tl.load(maxima + row * TILES + lanes, mask=lanes < TILES, other=float("-inf")), 0)
    x = tl.load(logits + row * STRIDE + columns, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = _real(words, 3).to(tl.float32)
    temperature = tl.where(temperature > 0.0, temperature, 1.0)
    scaled = tl.div_rn(x - best, tl.zeros_like(x) + temperature)
    return scaled.to(tl.int32, bitcast=True) & _MOST, inside & (scaled >= _real(words, 5).to(tl.float32))


@triton.jit
def is_kept(distance, columns, cuts, row):
    """Whether tokens lie before the cut, ties in the order of their ids."""
    cut = tl.load(cuts + 2 * row)
    return (distance < cut) | ((distance == cut) & (columns <= tl.load(cuts + 2 * row + 1)))


@triton.jit
def _bin_of(distance):
    return tl.minimum(distance.to(tl.float32, bitcast=True) * _BINS_PER_UNIT, _BINS - 1.0).to(tl.int32)


@triton.jit
def _weight(distance, BY_MASS: tl.constexpr, PLAIN: tl.constexpr):
    """1, or exp(-distance) in units of 1 / MASS_UNIT: int64."""
    if BY_MASS:
        scaled = -distance.to(tl.float32, bitcast=True)
        share = tl.exp(scaled) if PLAIN else libdevice.exp(scaled)
        return ((share.to(tl.float64) * _MASS_UNIT + _TO_INTEGER) - _TO_INTEGER).to(tl.int64)
    return distance.to(tl.int64) * 0 + 1


@triton.jit
def _is_wanted(words, BY_MASS: tl.constexpr):
    is_on = _real(words, 4) < 1.0 if BY_MASS else tl.load(words + 2) > 0
    return is_on & (_real(words, 3) > 0.0)


@triton.jit
def _find_bin(bins, words, row, BY_MASS: tl.constexpr):
    """(bin of the cut, weight before the bin, limit): a token is kept while the weight before it is below the limit."""
    lanes = tl.arange(0, _BINS)
    weights = tl.load(bins + row * _BINS + lanes)
    before = tl.cumsum(weights, 0) - weights
    if BY_MASS:
        limit = _real(words, 4) * tl.sum(weights, 0).to(tl.float64)
    else:
        limit = tl.load(words + 2).to(tl.float64)
    found = tl.max(tl.where((weights > 0) & (before.to(tl.float64) < limit), lanes, 0), 0)
    return found, tl.sum(tl.where(lanes == found, before, 0), 0), limit


@triton.jit
def _members(logits, maxima, words, cuts, row, columns, V, STRIDE, TILES: tl.constexpr, BLOCK: tl.constexpr,
             BY_MASS: tl.constexpr):  # fmt: skip
    """(distances, which tokens compete): those that the filters before have kept."""
    inside = columns < V
    distance, competes = distances(logits, maxima, words, row, columns, inside, STRIDE, TILES, BLOCK)
    if BY_MASS:
        competes = competes & is_kept(distance, columns, cuts, row)
    return distance, competes


@triton.jit(do_not_specialize=["V"])
def _fill_bins(
    logits, maxima, owners, words, cuts, bins, V, STRIDE,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BY_MASS: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Add a tile's weights to the bins of its row."""
    begin(EARLY)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    words += tl.maximum(tl.load(owners + row), 0) * _WORDS
    if _is_wanted(words, BY_MASS):
        distance, competes = _members(logits, maxima, words, cuts, row, columns, V, STRIDE, TILES, BLOCK, BY_MASS)
        weight = _weight(distance, BY_MASS, PLAIN)
        places = bins + row * _BINS + _bin_of(distance)
        tl.atomic_add(places, weight, mask=competes & (weight > 0), sem="relaxed")


@triton.jit(do_not_specialize=["V"])
def _gather_bin(
    logits, maxima, owners, words, cuts, bins, counts, found, found_ids, V, STRIDE,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BY_MASS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """List the tokens of the bin of the cut, in any order."""
    begin(EARLY)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    words += tl.maximum(tl.load(owners + row), 0) * _WORDS
    if _is_wanted(words, BY_MASS):
        wanted, _, _ = _find_bin(bins, words, row, BY_MASS)
        distance, competes = _members(logits, maxima, words, cuts, row, columns, V, STRIDE, TILES, BLOCK, BY_MASS)
        chosen = competes & (_bin_of(distance) == wanted)
        number = tl.cumsum(chosen.to(tl.int32), 0)
        total = tl.sum(chosen.to(tl.int32), 0)
        if total > 0:
            place = row * V + tl.atomic_add(counts + row, total, sem="relaxed") + number - 1
            tl.store(found + place, distance, mask=chosen)
            tl.store(found_ids + place, columns, mask=chosen)


@triton.jit
def _weight_before(found, distance, count, BLOCK: tl.constexpr, BY_MASS: tl.constexpr, PLAIN: tl.constexpr):
    """Weight of the listed tokens that lie nearer than `distance`."""
    total = tl.zeros([], dtype=tl.int64)
    for start in range(0, count, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        own = tl.load(found + lanes, mask=lanes < count, other=0)
        total += tl.sum(tl.where((own < distance) & (lanes < count), _weight(own, BY_MASS, PLAIN), 0), 0)
    return total


@triton.jit
def _nearest_cut(found, highest, count, BLOCK: tl.constexpr):
    """(the largest listed distance up to `highest`, how many tokens lie at it)."""
    cut = tl.full([], -1, tl.int32)
    for start in range(0, count, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        own = tl.load(found + lanes, mask=lanes < count, other=_MOST)
        cut = tl.maximum(cut, tl.max(tl.where((own <= highest) & (lanes < count), own, -1), 0))
    ties = tl.zeros([], dtype=tl.int32)
    for start in range(0, count, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        own = tl.load(found + lanes, mask=lanes < count, other=_MOST)
        ties += tl.sum(((own == cut) & (lanes < count)).to(tl.int32), 0)
    return cut, ties


@triton.jit
def _last_id(found, found_ids, cut, room, count, V, BLOCK: tl.constexpr):
    """The id of tie number `room`, from 1."""
    low = tl.zeros([], dtype=tl.int32)
    high = tl.zeros([], dtype=tl.int32) + V - 1
    while low < high:
        middle = low + ((high - low) >> 1)
        reached = tl.zeros([], dtype=tl.int32)
        for start in range(0, count, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            own = tl.load(found + lanes, mask=lanes < count, other=_MOST)
            ids = tl.load(found_ids + lanes, mask=lanes < count, other=_MOST)
            reached += tl.sum(((own == cut) & (ids <= middle)).to(tl.int32), 0)
        is_enough = reached >= room
        low = tl.where(is_enough, low, middle + 1)
        high = tl.where(is_enough, middle, high)
    return low


@triton.jit(do_not_specialize=["V"])
def _solve(
    owners, words, cuts, bins, counts, found, found_ids, V,
    BLOCK: tl.constexpr, BY_MASS: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The cut of each row among the listed tokens."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    words += tl.maximum(tl.load(owners + row), 0) * _WORDS
    found += row * V
    found_ids += row * V
    if _is_wanted(words, BY_MASS):
        _, before, limit = _find_bin(bins, words, row, BY_MASS)
        count = tl.load(counts + row)
        # The largest distance up to which the weight before a token stays below the limit.
        low = tl.zeros([], dtype=tl.int32)
        high = tl.full([], _MOST, tl.int32)
        while low < high:
            middle = low + ((high - low) >> 1) + ((high - low) & 1)
            reached = before + _weight_before(found, middle, count, BLOCK, BY_MASS, PLAIN)
            is_short = reached.to(tl.float64) < limit
            low = tl.where(is_short, middle, low)
            high = tl.where(is_short, high, middle - 1)
        cut, ties = _nearest_cut(found, low, count, BLOCK)
        nearer = before + _weight_before(found, cut, count, BLOCK, BY_MASS, PLAIN)
        # The ties that are still short of the limit when their turn comes.
        weight = _weight(cut, BY_MASS, PLAIN)
        least, room = tl.full([], 1, tl.int32), ties
        while least < room:
            middle = least + ((room - least + 1) >> 1)
            is_short = (nearer + (middle - 1).to(tl.int64) * weight).to(tl.float64) < limit
            least = tl.where(is_short, middle, least)
            room = tl.where(is_short, room, middle - 1)
        last = tl.full([], _MOST, tl.int32)
        if BY_MASS:
            # Ties that top-k has dropped stay dropped.
            last = tl.where(cut == tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1), last)
        if room < ties:
            last = _last_id(found, found_ids, cut, room, count, V, BLOCK)
        tl.store(cuts + 2 * row, cut)
        tl.store(cuts + 2 * row + 1, last)
    elif not BY_MASS:
        tl.store(cuts + 2 * row, _MOST)
        tl.store(cuts + 2 * row + 1, _MOST)


def find_cuts(logits: Tensor, maxima: Tensor, owners: Tensor, words: Tensor) -> Cuts:
    """Where top-k and then top-p cut rows of logits [T, V].

    Args:
        maxima: [T, tiles] float32, the best logit of each part of the rows, however they are divided.
        owners: [T] int64, contiguous. words: of `DrawParams`.
    """
    num_rows, vocab_size = logits.shape
    cuts = torch.empty(num_rows, 2, dtype=torch.int32, device=logits.device)
    found = torch.empty(2, num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    zeros = torch.zeros(2, num_rows, _NUM_BINS + 1, dtype=torch.int64, device=logits.device)
    tiles, early = maxima.shape[1], early_launch()
    grid, block = (num_rows, triton.cdiv(vocab_size, TILE)), block_of(tiles)
    options = {"num_warps": 4, "launch_pdl": early, "enable_fp_fusion": False}
    for by_mass, own in enumerate(zeros):
        bins, counts = own.view(-1)[: num_rows * _NUM_BINS], own.view(-1)[num_rows * _NUM_BINS :].view(torch.int32)
        _fill_bins[grid](
            logits, maxima, owners, words, cuts, bins, vocab_size, logits.stride(0), tiles, block, TILE,
            by_mass, early, INTERPRETED, **options,
        )  # fmt: skip
        _gather_bin[grid](
            logits, maxima, owners, words, cuts, bins, counts, found[0], found[1], vocab_size,
            logits.stride(0), tiles, block, TILE, by_mass, early, **options,
        )  # fmt: skip
        _solve[(num_rows,)](
            owners, words, cuts, bins, counts, found[0], found[1], vocab_size, TILE, by_mass, early,
            INTERPRETED, **options,
        )  # fmt: skip
    return Cuts(maxima, cuts)
