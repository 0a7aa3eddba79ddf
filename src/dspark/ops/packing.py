"""Coded weights as the product kernels read them: repacked once at load, the same bytes in another order.

A kernel turns a 16-bit element into two (fp8) or four (fp4) bf16 values with a few bit operations. Two things make
them few. First, the values of one element belong to different runs of 32 columns, so each run comes out as a whole
tile with one scale. Example, fp4: element c of a chunk of 128 columns holds the codes of columns c, 32 + c, 64 + c
and 96 + c. Second, the bits of two neighbouring elements are permuted inside their 32-bit word so that one rotation
and one mask put sign, exponent and mantissa where bf16 has them.

A code placed at bf16's bits is its value times 2^-126 (e2m1) or 2^-120 (e4m3); the stored scale byte is the exponent
field of the bf16 power of two that restores the value, so the product's operands are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.config.errors import DSparkError

TILE_ROWS = 64  # rows that lie together
CHUNK = 128  # columns of a step; its four runs of 32 columns have a scale byte each
RUN = 32
GROUP_ROWS = 256  # the largest block of rows: groups of rows that read their own columns come in whole ones
_PAD_ROWS = 128  # a program may take two tiles of rows
_E2M1_EXPONENT, _E4M3_EXPONENT = 126, 120
_LARGEST_FIELD = 254

# Where each of an element's values has its bits: (rotation to the right, mask) pieces of the bf16 pair that it becomes.
_FP4_PIECES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 0x81C081C0),),
    ((12, 0x81C081C0),),
    ((6, 0x81C081C0),),
    ((10, 0x81808180), (2, 0x00400040)),
)
_FP8_PIECES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 0x87F087F0),),
    ((12, 0x87808780), (4, 0x00700070)),
)


class Kind(StrEnum):
    """Codes of a packed weight."""

    FP4 = "fp4"
    FP8 = "fp8"


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A stack of E coded weights [N, K] (E is 1 for a linear map).

    Attributes:
        codes: [E, N' / 64, K' / 128, elements, 64, 32] int16; N' and K' are N and K in whole 128s; one element run a
            chunk for fp4, two for fp8.
        scales: [E, K' / 128, ceil(N' / scale_rows)] int32, a byte for each run of 32 columns.
        scale_rows: rows that share a scale: 1, 32 or 128.
        num_rows, depth: N and K.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    scale_rows: int
    num_rows: int
    depth: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return self.codes.shape[0], self.num_rows, self.depth

    @property
    def num_bytes(self) -> int:
        """What a product reads."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on another device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


def pack_fp4(codes: Tensor, scale: Tensor) -> PackedWeight:
    """Pack stored fp4 weights.

    Args:
        codes: [N, K / 2] or [E, N, K / 2] int8, the even column in the low nibble.
        scale: [.., N, K / 32] e8m0.
    """
    raw = _stack(codes).view(torch.uint8)
    nibbles = torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)
    values = (nibbles.int() & 8) << 12 | (nibbles.int() & 7) << 6
    return _pack(Kind.FP4, values, _stack(scale), (1, RUN), _E2M1_EXPONENT, _FP4_PIECES)


def pack_fp8(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Pack stored fp8 weights.

    Args:
        codes: [N, K] or [E, N, K] e4m3 without NaN.
        scale: [.., ceil(N / block[0]), ceil(K / block[1])] e8m0.
        block: (32, 32), (128, 128) or (1, 32).
    """
    raw = _stack(codes).view(torch.uint8).int()
    if bool(((raw & 0x7F) == 0x7F).any()):
        raise DSparkError("a weight stored in fp8 holds a value that is not a number: fetch the checkpoint again")
    values = (raw & 0x80) << 8 | (raw & 0x7F) << 4
    return _pack(Kind.FP8, values, _stack(scale), block, _E4M3_EXPONENT, _FP8_PIECES)


def join_rows(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One weight whose rows are those of several that read the same input; a single launch then serves them all.

    Raises:
        DSparkError: the weights differ in kind, depth or scales, or one before the last has no whole 128s of rows.
    """
    first = weights[0]
    for weight in weights[1:]:
        if (weight.kind, weight.depth, weight.scale_rows) != (first.kind, first.depth, first.scale_rows):
            raise DSparkError("only weights of one storage form and depth can be joined")
    if any(weight.num_rows % _PAD_ROWS for weight in weights[:-1]):
        raise DSparkError(f"weights can be joined in whole {_PAD_ROWS}s of rows only")
    codes = torch.cat([weight.codes for weight in weights], dim=1)
    scales = torch.cat([weight.scales for weight in weights], dim=2)
    return replace(first, codes=codes, scales=scales, num_rows=sum(weight.num_rows for weight in weights))


Weight = Tensor | PackedWeight


def join_weights(weights: Sequence[Weight]) -> tuple[Weight, list[Weight]] | None:
    """One weight whose rows are those of several, and they as parts of its memory; None where storage forbids it."""
    if len(weights) < 2:
        return None
    plain = [weight.detach() for weight in weights if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16]
    if len(plain) == len(weights):
        whole = torch.cat(plain)
        return whole, list(whole.split([weight.shape[0] for weight in plain]))
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    is_whole = all(weight.num_rows % _PAD_ROWS == 0 for weight in packed[:-1])
    forms = {(weight.kind, weight.depth, weight.scale_rows) for weight in packed}
    if len(packed) < len(weights) or len(forms) > 1 or not is_whole:
        return None
    joined = join_rows(packed)
    parts = joined.codes.split([weight.codes.shape[1] for weight in packed], dim=1)
    return joined, [replace(weight, codes=codes) for weight, codes in zip(packed, parts, strict=True)]


def stack_experts(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One stack of the experts that follow each other in `weights`, all of one kind and shape."""
    first = weights[0]
    codes = torch.cat([weight.codes for weight in weights])
    return replace(first, codes=codes, scales=torch.cat([weight.scales for weight in weights]))


def unpack(weight: PackedWeight) -> Tensor:
    """[E, N, K] float32 values; the inverse of packing, for tests and reading."""
    pieces = _FP4_PIECES if weight.kind is Kind.FP4 else _FP8_PIECES
    words = weight.codes.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    runs = []
    for run in pieces:
        pairs = torch.zeros_like(words)
        for turn, mask in run:
            pairs |= _rotate_left(words, turn) & mask
        halves = torch.stack((pairs & 0xFFFF, pairs >> 16), dim=-1).flatten(-2)
        runs.append((halves << 16).to(torch.int32).view(torch.float32))
    values = torch.stack(runs, dim=-2)  # [E, N / 64, chunks, elements, 64, runs, 32]
    num_experts, tiles, chunks = values.shape[:3]
    values = values.permute(0, 1, 4, 2, 3, 5, 6).reshape(num_experts, tiles * TILE_ROWS, chunks, -1, RUN)
    fields = torch.stack([weight.scales >> 8 * run & 0xFF for run in range(4)], dim=-1)  # [E, chunks, N / rows, 4]
    fields = fields.repeat_interleave(weight.scale_rows, dim=2)[:, :, : values.shape[1]].transpose(1, 2)
    whole = (values.double() * torch.exp2((fields - 127).double()).unsqueeze(-1)).float()
    return whole.flatten(2)[:, : weight.num_rows, : weight.depth]


def _stack(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _pack(
    kind: Kind,
    values: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    lift: int,
    pieces: tuple[tuple[tuple[int, int], ...], ...],
) -> PackedWeight:
    """Codes [E, N, K] at bf16's bit places, and their scales, in the order of the kernels."""
    num_experts, num_rows, depth = values.shape
    if block not in ((1, RUN), (RUN, RUN), (CHUNK, CHUNK)):
        raise DSparkError(f"a weight with scales of {block[0]}x{block[1]} cannot be packed: 1x32, 32x32 or 128x128")
    values = F.pad(values, (0, -depth % CHUNK, 0, -num_rows % _PAD_ROWS))
    per_element = len(pieces)
    # [E, tiles, 64, chunks, elements, values of an element, pairs, 2]
    parts = values.view(num_experts, values.shape[1] // TILE_ROWS, TILE_ROWS, -1, 4 // per_element, per_element, 16, 2)
    words = torch.zeros_like(parts[..., 0, :, 0]).long()
    for place, run in enumerate(pieces):
        pairs = parts[..., place, :, 0].long() | parts[..., place, :, 1].long() << 16
        for turn, mask in run:
            words |= _rotate_left(pairs & mask, 32 - turn)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    codes = signed.permute(0, 1, 3, 4, 2, 5).contiguous().view(torch.int16)
    return PackedWeight(kind, codes, _pack_scales(scale, block, lift, values.shape), block[0], num_rows, depth)


def _pack_scales(scale: Tensor, block: tuple[int, int], lift: int, shape: torch.Size) -> Tensor:
    """[E, chunks, ceil(N' / block rows)] int32 of e8m0 scales."""
    fields = scale.view(torch.uint8).int() + lift
    if fields.numel() and int(fields.max()) > _LARGEST_FIELD:
        raise DSparkError(
            f"a weight has a block scale of 2^{int(fields.max()) - lift - 127}; the products hold at most "
            f"2^{_LARGEST_FIELD - lift - 127}: this checkpoint cannot be run on an accelerator"
        )
    fields = fields.repeat_interleave(block[1] // RUN, dim=-1)
    rows = -(-shape[1] // block[0])
    fields = F.pad(fields, (0, shape[2] // RUN - fields.shape[-1], 0, rows - fields.shape[-2]), value=lift + 127)
    runs = fields.unflatten(-1, (-1, 4)).long()
    words = runs[..., 0] | runs[..., 1] << 8 | runs[..., 2] << 16 | runs[..., 3] << 24
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return signed.transpose(1, 2).contiguous()


def _rotate_left(words: Tensor, turn: int) -> Tensor:
    """32-bit rotation of words held in int64."""
    turn %= 32
    return (words << turn | words >> (32 - turn)) & 0xFFFFFFFF
