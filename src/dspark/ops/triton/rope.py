"""Factors of a rotation, and the rotation of the last elements of heads inside other kernels."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.rope import Turn, TurnTable
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import block_of, packed


@triton.jit
def turn_pairs(x, cos, sin, way, K: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rotate the last ROPE of K lanes of a float32 block [ROWS, BLOCK_K], all by the factors at `cos` and `sin`.

    Written as single operations, so that every kernel gives the same bits. `way` is 1, or -1 for the inverse.
    """
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK_K // 2, 2)))
    lanes = 2 * tl.arange(0, BLOCK_K // 2) - (K - ROPE)
    turns = (lanes >= 0) & (lanes < ROPE)
    c = tl.broadcast_to(tl.load(cos + lanes, mask=turns, other=1.0)[None, :], even.shape)
    # The sine that stands at an odd place has its own sign.
    s = tl.broadcast_to((tl.load(sin + lanes + 1, mask=turns, other=0.0) * way)[None, :], even.shape)
    turned_even = tl.fma(even, c, -(odd * s))
    turned_odd = tl.fma(odd, c, even * s)
    even, odd = tl.where(turns[None, :], turned_even, even), tl.where(turns[None, :], turned_odd, odd)
    return tl.reshape(tl.join(even, odd), (ROWS, BLOCK_K))


@triton.jit
def _rotations(positions, freqs, ratios, out, ROPE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program a row and entry of a table: its cosines and sines [entry, 2, row, ROPE]."""
    row, entry, num_rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < ROPE
    begin(EARLY)
    position = tl.load(positions + row).to(tl.int32)
    position -= position % tl.load(ratios + entry).to(tl.int32)
    freq = tl.load(freqs + entry * (ROPE // 2) + lanes // 2, mask=inside, other=0.0)
    angle = position.to(tl.float32) * freq
    sine = tl.sin(angle)
    cos = out + (2 * entry * num_rows + row) * ROPE + lanes
    tl.store(cos, tl.cos(angle), mask=inside)
    tl.store(cos + num_rows * ROPE, tl.where(lanes % 2 == 0, -sine, sine), mask=inside)


def rotations(positions: Tensor, freqs: Tensor) -> Turn:
    """See `dspark.ops.rope.rotations`."""
    return row_rotations(positions, TurnTable(freqs.unsqueeze(0), _one(freqs.device)))[0]


def row_rotations(positions: Tensor, table: TurnTable) -> list[Turn]:
    """See `dspark.ops.rope.row_rotations`."""
    num_rows, count, size, early = positions.shape[0], table.freqs.shape[0], 2 * table.freqs.shape[1], early_launch()
    out = table.freqs.new_empty(count, 2, num_rows, size)
    if num_rows:
        _rotations[(num_rows, count)](
            packed(positions), *table, out, size, block_of(size), early, num_warps=1, launch_pdl=early
        )
    return [(cos, sin) for cos, sin in out]


@lru_cache(maxsize=16)
def _one(device: torch.device) -> Tensor:
    """[1], the ratio of rows; it outlives the graphs that read it."""
    with torch.inference_mode(False):
        return torch.ones(1, dtype=torch.int64, device=device)
