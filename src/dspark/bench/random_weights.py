"""Random weights in the real storage forms, made on the device: only their bytes and their range matter."""

import torch
from torch import Tensor

from dspark.bench.kernel_shapes import Form
from dspark.ops.packing import CHUNK, RUN, TILE_ROWS, Kind, PackedWeight

# Exponent fields of scales near 2^-10, as released weights have them.
_LOW, _HIGH = 114, 120
_LIFT = {Kind.FP4: 126, Kind.FP8: 120}
_SCALE_ROWS = {Form.FP4: 1, Form.FP8_32: 32, Form.FP8_128: 128}


def random_weight(form: Form, E: int, N: int, K: int, device: torch.device, seed: int = 0) -> Tensor | PackedWeight:
    """E weights [N, K]: packed codes with scales, or a bf16 stack; every code is as likely as any other."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if form is Form.BF16:
        stack = torch.empty(E, N, K, dtype=torch.bfloat16, device=device)
        return stack.normal_(0, K**-0.5, generator=generator)
    kind = Kind.FP4 if form is Form.FP4 else Kind.FP8
    rows, chunks, scale_rows = -(-N // 128) * 128, -(-K // CHUNK), _SCALE_ROWS[form]
    shape = (E, rows // TILE_ROWS, chunks, 1 if kind is Kind.FP4 else 2, TILE_ROWS, RUN)
    codes = torch.empty(shape, dtype=torch.int16, device=device).random_(-(2**15), 2**15, generator=generator)
    scales = torch.zeros(E, chunks, -(-rows // scale_rows), dtype=torch.int32, device=device)
    for run in range(4):
        fields = torch.randint(_LOW, _HIGH, scales.shape, generator=generator, device=device, dtype=torch.int32)
        scales |= (fields + _LIFT[kind]).clamp(max=254) << 8 * run
    return PackedWeight(kind, codes, scales, scale_rows, N, K)


def weight_bytes(weight: Tensor | PackedWeight) -> int:
    """Bytes of a whole stack."""
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


def member(weight: Tensor | PackedWeight, index: int) -> Tensor | PackedWeight:
    """Weight number `index` of a stack, as a stack of one."""
    if isinstance(weight, Tensor):
        return weight[index : index + 1]
    part = slice(index, index + 1)
    return PackedWeight(
        weight.kind, weight.codes[part], weight.scales[part], weight.scale_rows, weight.num_rows, weight.depth
    )
