"""Factors of a rotation, and the rotation of the last elements of heads inside other kernels."""

import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.rope import Turn
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
def _rotations(positions, freqs, cos, sin, ROPE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < ROPE
    begin(EARLY)
    angle = tl.load(positions + row).to(tl.float32) * tl.load(freqs + lanes // 2, mask=inside, other=0.0)
    sine = tl.sin(angle)
    tl.store(cos + row * ROPE + lanes, tl.cos(angle), mask=inside)
    tl.store(sin + row * ROPE + lanes, tl.where(lanes % 2 == 0, -sine, sine), mask=inside)


def rotations(positions: Tensor, freqs: Tensor) -> Turn:
    """See `dspark.ops.rope.rotations`."""
    num_rows, size, early = positions.shape[0], 2 * freqs.shape[0], early_launch()
    cos, sin = freqs.new_empty(2, num_rows, size)
    if num_rows:
        _rotations[(num_rows,)](
            packed(positions), freqs, cos, sin, size, block_of(size), early, num_warps=1, launch_pdl=early
        )
    return cos, sin
