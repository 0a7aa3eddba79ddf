"""Storage formats of weights, both ways: fp8 e4m3 and packed fp4 e2m1 codes, each with power-of-two block scales.

A stored value is code x 2^(scale byte - 127). Reading is exact in fp32. Writing picks, for each block, the smallest
scale under which the largest magnitude still has a code, and rounds to nearest with ties to the even code; values
that came out of a stored tensor are therefore stored again without any change.
"""

import torch
from torch import Tensor

from dspark.config.errors import CheckpointError

Block = tuple[int, int]

FP8_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = torch.float8_e8m0fnu
FP4_GROUP = 32
# A table is quantised row by row, so that one row can be read without its neighbours.
TABLE_BLOCK: Block = (1, 32)

# Largest magnitudes as mantissa in [0.5, 1) and exponent: 448 = 0.875 x 2^9, 6 = 0.75 x 2^3.
_FP8_MAX = (0.875, 9)
_FP4_MAX = (0.75, 3)
_MIN_EXPONENT, _MAX_EXPONENT, _BIAS = -127, 127, 127

_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Where the code of a magnitude goes up by one. A midpoint belongs to its even neighbour: 0.25 stays 0 (code 0), so
# the first step is just above it, whereas 0.75 rounds up to 1.0 (code 2).
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scales of a [..., N, K] tensor: blocks at the edges may be smaller, so the division rounds up."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def dequantise_fp8(weight: Tensor, scale: Tensor, block: Block, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of fp8 codes.

    Args:
        weight: [..., N, K] e4m3.
        scale: [..., ceil(N / block[0]), ceil(K / block[1])] e8m0.
        block: rows and columns that share a scale: (128, 128), (32, 32), or `TABLE_BLOCK`.
        dtype: of the result; bf16 holds every e4m3 code times a scale of its own range exactly.

    Raises:
        CheckpointError: the scales do not fit the weight.
    """
    _check_scale(weight.shape, scale, block)
    values = weight.to(torch.float32).mul_(_spread(scale, weight.shape, block))
    return values.to(dtype)


def quantise_fp8(values: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Codes [..., N, K] e4m3 and scales e8m0 of float values [..., N, K]; the inverse of `dequantise_fp8`."""
    values = _finite(values)
    scale = _block_scale(values, block, _FP8_MAX)
    codes = values.div(_spread(scale, values.shape, block)).to(FP8_DTYPE)
    return codes, scale


def dequantise_fp4(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of packed fp4 codes.

    Args:
        weight: [..., N, K / 2] int8, two codes a byte along K, the even column in the low nibble.
        scale: [..., N, K / 32] e8m0.
        dtype: of the result.

    Returns:
        [..., N, K].

    Raises:
        CheckpointError: the scales do not fit the weight.
    """
    codes = unpack_fp4(weight)
    block = (1, FP4_GROUP)
    _check_scale(codes.shape, scale, block)
    return fp4_values(codes).mul_(_spread(scale, codes.shape, block)).to(dtype)


def quantise_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes [..., N, K / 2] int8 and scales [..., N, K / 32] e8m0 of float values [..., N, K].

    Raises:
        CheckpointError: K is not a multiple of 32, which the layout cannot express.
    """
    if values.shape[-1] % FP4_GROUP:
        raise CheckpointError(f"fp4 storage needs rows of a multiple of {FP4_GROUP} values, not {values.shape[-1]}")
    values = _finite(values)
    block = (1, FP4_GROUP)
    scale = _block_scale(values, block, _FP4_MAX)
    codes = fp4_codes(values.div(_spread(scale, values.shape, block)))
    return pack_fp4(codes), scale


def fp4_values(codes: Tensor) -> Tensor:
    """fp32 values of e2m1 codes 0..15 (bit 3 is the sign)."""
    magnitudes = torch.tensor(_FP4_MAGNITUDES + tuple(-x for x in _FP4_MAGNITUDES), device=codes.device)
    return magnitudes[codes.to(torch.int64)]


def fp4_codes(values: Tensor) -> Tensor:
    """Nearest e2m1 codes (uint8, 0..15) of values in [-6, 6]; ties go to the even code, larger values to 6."""
    steps = torch.tensor(_FP4_MIDPOINTS, dtype=torch.float32)
    steps[0::2] = torch.nextafter(steps[0::2], torch.tensor(torch.inf))
    magnitude = torch.bucketize(values.abs().contiguous(), steps.to(values.device), right=True, out_int32=True)
    sign = torch.signbit(values).to(torch.uint8) << 3
    return magnitude.to(torch.uint8) | sign


def unpack_fp4(packed: Tensor) -> Tensor:
    """Codes [..., K] uint8 of bytes [..., K / 2]: byte j holds columns 2j (low nibble) and 2j + 1 (high nibble)."""
    raw = packed.view(torch.uint8)
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)


def pack_fp4(codes: Tensor) -> Tensor:
    """Bytes [..., K / 2] int8 of codes [..., K]; the inverse of `unpack_fp4`."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)


def _finite(values: Tensor) -> Tensor:
    """fp32 values, refused when one of them has no code."""
    values = values.to(torch.float32)
    if not torch.isfinite(values).all():
        raise CheckpointError("a weight with infinite or undefined values cannot be stored in fp8 or fp4")
    return values


def _block_scale(values: Tensor, block: Block, largest: tuple[float, int]) -> Tensor:
    """Smallest power of two, per block, under which the block's largest magnitude is at most `largest`.

    With amax = m x 2^e and largest = M x 2^E, both mantissas in [0.5, 1), the exponent is e - E, plus one where m > M:
    the exact value of ceil(log2(amax / largest)), which a floating logarithm misses beside powers of two.
    """
    mantissa, exponent = torch.frexp(_block_amax(values, block))
    exponent = exponent - largest[1] + (mantissa > largest[0]).to(exponent.dtype)
    exponent = torch.where(mantissa == 0, 0, exponent.clamp(_MIN_EXPONENT, _MAX_EXPONENT))
    return (exponent + _BIAS).to(torch.uint8).view(SCALE_DTYPE)


def _block_amax(values: Tensor, block: Block) -> Tensor:
    *lead, N, K = values.shape
    rows, columns = scale_shape(values.shape, block)[-2:]
    padded = torch.nn.functional.pad(values.abs(), (0, columns * block[1] - K, 0, rows * block[0] - N))
    return padded.reshape(*lead, rows, block[0], columns, block[1]).amax(dim=(-3, -1))


def _spread(scale: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """The fp32 scale of every element of a [..., N, K] tensor."""
    spread = scale.to(torch.float32)
    spread = spread.repeat_interleave(block[0], dim=-2) if block[0] > 1 else spread
    return spread.repeat_interleave(block[1], dim=-1)[..., : shape[-2], : shape[-1]]


def _check_scale(shape: tuple[int, ...], scale: Tensor, block: Block) -> None:
    wanted = scale_shape(tuple(shape), block)
    if tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"scales of shape {list(scale.shape)} do not fit a weight of shape {list(shape)} in blocks of "
            f"{block[0]}x{block[1]}: {list(wanted)} expected"
        )
