"""Codes to bf16 inside kernels: a few bit operations a pair of values, then one exact multiplication by its scale.

Each function has two bodies. On a GPU, inline assembly on the 32-bit word that holds two neighbouring 16-bit elements;
its input and outputs are registers that hold pairs, as the matrix units take them. Under the interpreter, the same bit
operations in Triton on one element at a time, which therefore needs its neighbour (`partners`).
"""

import triton
import triton.language as tl


@triton.jit
def run_scale(scales, RUN: tl.constexpr):
    """The bf16 scale of a run of 32 columns, twice in one int32: byte `RUN` of `scales` is its exponent field."""
    return ((scales >> (8 * RUN)) & 0xFF) * 0x00800080


@triton.jit
def fp4_runs(words, scales):
    """Four bf16 tiles [N, 32], one a run, of packed e2m1 elements [N, 32] int16 and scale bytes [N] int32."""
    return tl.inline_asm_elementwise(
        asm="""
        {
            .reg .b32 a, b, c, d, e;
            and.b32 a, $4, 0x81C081C0;
            shf.l.wrap.b32 b, $4, $4, 12;
            and.b32 b, b, 0x81C081C0;
            shl.b32 c, $4, 6;
            and.b32 c, c, 0x81C081C0;
            shf.l.wrap.b32 d, $4, $4, 10;
            shl.b32 e, $4, 2;
            and.b32 e, e, 0x00400040;
            lop3.b32 d, d, 0x81808180, e, 0xEA;
            mul.rn.bf16x2 $0, a, $5;
            mul.rn.bf16x2 $1, b, $7;
            mul.rn.bf16x2 $2, c, $9;
            mul.rn.bf16x2 $3, d, $11;
        }
        """,
        constraints="=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
        args=[
            words,
            run_scale(scales, 0)[:, None],
            run_scale(scales, 1)[:, None],
            run_scale(scales, 2)[:, None],
            run_scale(scales, 3)[:, None],
        ],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def fp8_runs(words, scales, FIRST: tl.constexpr):
    """Two bf16 tiles [N, 32], runs `FIRST` and `FIRST` + 1, of packed e4m3 elements [N, 32] int16."""
    return tl.inline_asm_elementwise(
        asm="""
        {
            .reg .b32 a, b, c;
            and.b32 a, $2, 0x87F087F0;
            shf.l.wrap.b32 b, $2, $2, 12;
            shl.b32 c, $2, 4;
            and.b32 c, c, 0x00700070;
            lop3.b32 b, b, 0x87808780, c, 0xEA;
            mul.rn.bf16x2 $0, a, $3;
            mul.rn.bf16x2 $1, b, $5;
        }
        """,
        constraints="=r,=r,r,r,r,r,r",
        args=[words, run_scale(scales, FIRST)[:, None], run_scale(scales, FIRST + 1)[:, None]],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _word(words, partners):
    """The 32-bit word of each element [N, 32]; even elements are its low half."""
    own, other = words.to(tl.int32) & 0xFFFF, partners.to(tl.int32) & 0xFFFF
    is_even = (tl.arange(0, 32) % 2 == 0)[None, :]
    return tl.where(is_even, own | (other << 16), other | (own << 16)).to(tl.uint32, bitcast=True)


@triton.jit
def _own_value(pairs, scales, RUN: tl.constexpr):
    """float32 of the half of each pair that belongs to the element, times its scale."""
    is_even = (tl.arange(0, 32) % 2 == 0)[None, :]
    bits = tl.where(is_even, pairs << 16, pairs & 0xFFFF0000).to(tl.uint32)
    factor = (((scales >> (8 * RUN)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) * factor[:, None]


@triton.jit
def plain_fp4_runs(words, partners, scales):
    """`fp4_runs` for the interpreter: float32 tiles."""
    word = _word(words, partners)
    second = (word << 12) | (word >> 20)
    last = (((word << 10) | (word >> 22)) & 0x81808180) | ((word << 2) & 0x00400040)
    return (
        _own_value(word & 0x81C081C0, scales, 0),
        _own_value(second & 0x81C081C0, scales, 1),
        _own_value((word << 6) & 0x81C081C0, scales, 2),
        _own_value(last, scales, 3),
    )


@triton.jit
def plain_fp8_runs(words, partners, scales, FIRST: tl.constexpr):
    """`fp8_runs` for the interpreter: float32 tiles."""
    word = _word(words, partners)
    second = (((word << 12) | (word >> 20)) & 0x87808780) | ((word << 4) & 0x00700070)
    return _own_value(word & 0x87F087F0, scales, FIRST), _own_value(second, scales, FIRST + 1)
