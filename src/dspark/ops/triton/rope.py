"""Rotation of the last elements of heads: element by element, all heads of a row in one program."""

import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.triton.launch import block_of, new_output, packed, rounded

_HEADS = 16  # of one program


@triton.jit
def _rotate(x, cos, sin, out, H, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_K)
    inside = (heads < H)[:, None] & (lanes < K)[None, :]
    places = (row * H + heads)[:, None] * K
    turned = lanes - (K - ROPE)
    turns = (turned >= 0) & (lanes < K)
    own = tl.load(x + places + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
    neighbour = tl.where(turns, (turned ^ 1) + (K - ROPE), lanes)
    other = tl.load(x + places + neighbour[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
    c = tl.load(cos + row * ROPE + turned, mask=turns, other=1.0)[None, :]
    s = tl.load(sin + row * ROPE + turned, mask=turns, other=0.0)[None, :]
    found = tl.where(turns[None, :], own * c + other * s, own)
    tl.store(out + places + lanes[None, :], found.to(out.dtype.element_ty), mask=inside)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `dspark.ops.rope.apply_rope`."""
    num_heads = x.shape[1] if x.dim() == 3 else 1
    size = x.shape[-1]
    out = new_output(x, *x.shape)
    if x.shape[0]:
        grid = (x.shape[0], triton.cdiv(num_heads, _HEADS))
        heads = min(block_of(num_heads), _HEADS)
        _rotate[grid](
            packed(x), packed(cos), packed(sin), out, num_heads, size, cos.shape[-1], heads, block_of(size), num_warps=4
        )
    return rounded(out, x)
