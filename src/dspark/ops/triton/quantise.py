"""Fake quantisation of rows in groups; the scales and codes are those of the torch twin to the bit.

Rounding is done on float32 values: with an integer step on the bits where the grid is floating, and by adding and
subtracting a number so large that only whole steps survive where it is even. Both round to nearest, ties to even.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.quantise import FP4_MAX, FP8_MAX
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import section_sum
from dspark.ops.triton.launch import INTERPRETED, new_output, packed, rounded

_ELEMENTS = 1024  # of one program
KINDS = {"fp8": 0, "fp4": 1, "fp4_e4m3": 2, "none": 3}
_FP8, _FP4, NONE = (tl.constexpr(KINDS[kind]) for kind in ("fp8", "fp4", "none"))
_FP8_LIMIT, _FP4_LIMIT = tl.constexpr(FP8_MAX), tl.constexpr(FP4_MAX)
_TO_WHOLE = tl.constexpr(1.5 * 2**23)
_TO_512TH = tl.constexpr(1.5 * 2**14)


@triton.jit
def _round_e4m3(x):
    """Nearest e4m3 value of |x| <= 464: three mantissa bits, or whole 512ths below the smallest normal number."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + _TO_512TH) - _TO_512TH, normal)


@triton.jit
def _round_e2m1(x):
    """Nearest e2m1 value of |x| <= 6: steps of a half below 2, of 1 below 4, then of 2."""
    size = tl.abs(x)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    return ((x / step + _TO_WHOLE) - _TO_WHOLE) * step


@triton.jit
def _power_of_two_ceiling(x):
    return (x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000


@triton.jit
def _inverse_power(bits):
    """Bits of 2^-e from those of 2^e."""
    return 0x7F000000 - bits


@triton.jit
def rounded_fp8(x):
    """float32 values [groups, columns] on the e4m3 grid of a scale for each group."""
    bits = _power_of_two_ceiling(tl.maximum(tl.max(tl.abs(x), 1), 1e-4) * (1.0 / _FP8_LIMIT))[:, None]
    codes = _round_e4m3(x * _inverse_power(bits).to(tl.float32, bitcast=True))
    return codes * bits.to(tl.float32, bitcast=True)


@triton.jit
def fake_quantise(values, KIND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """float32 [GROUPS, GROUP] on the grid of each group's own scale."""
    if KIND == _FP8:
        return rounded_fp8(values)
    largest = tl.max(tl.abs(values), 1)
    if KIND == _FP4:
        bits = _power_of_two_ceiling(tl.maximum(largest, _FP4_LIMIT * 2.0**-126) * (1.0 / _FP4_LIMIT))[:, None]
        scaled = values * _inverse_power(bits).to(tl.float32, bitcast=True)
        codes = _round_e2m1(tl.minimum(tl.maximum(scaled, -_FP4_LIMIT), _FP4_LIMIT))
        return codes * bits.to(tl.float32, bitcast=True)
    sixth = tl.div_rn(tl.maximum(largest, _FP4_LIMIT * 2.0**-9), tl.full([GROUPS], _FP4_LIMIT, tl.float32))
    scale = tl.broadcast_to(_round_e4m3(tl.minimum(sixth, _FP8_LIMIT))[:, None], [GROUPS, GROUP])
    scaled = tl.div_rn(values, scale)
    return _round_e2m1(tl.minimum(tl.maximum(scaled, -_FP4_LIMIT), _FP4_LIMIT)) * scale


@triton.jit(do_not_specialize=["num_groups"])
def _quantise(
    parts, out, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr, SECTIONS: tl.constexpr, ROUND: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    places = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < num_groups)[:, None]
    values = section_sum(parts, places, inside, num_groups * GROUP, SECTIONS, ROUND, PLAIN)
    tl.store(out + places, rounded_fp8(values).to(out.dtype.element_ty), mask=inside)


def quantise_fp8(x: Tensor, group: int) -> Tensor:
    """See `dspark.ops.quantise.quantise_fp8`; `group` is a power of two."""
    return quantise_sum(packed(x).unsqueeze(0), group, x)


def quantise_sum(parts: Tensor, group: int, like: Tensor) -> Tensor:
    """The same for the sum of parts [n, ...] from first to last, rounded to the dtype of `like` before and after."""
    out, early = new_output(like, *parts.shape[1:]), early_launch()
    num_groups = out.numel() // group
    if num_groups:
        groups = max(_ELEMENTS // group, 1)
        _quantise[(triton.cdiv(num_groups, groups),)](
            parts, out, num_groups, group, groups, parts.shape[0], like.dtype == torch.bfloat16, early, INTERPRETED,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return rounded(out, like)
