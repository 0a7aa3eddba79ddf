"""Linear maps: rows times a bf16 or coded weight, for any number of rows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from dspark.ops.packing import CHUNK, TILE_ROWS, PackedWeight
from dspark.ops.triton import plain_product
from dspark.ops.triton.early import early_launch
from dspark.ops.triton.launch import INTERPRETED, packed
from dspark.ops.triton.parts import add_parts
from dspark.ops.triton.product import Shape, product
from dspark.ops.triton.quantise import quantise_fp8, quantise_sum

_WIDE = 16384  # rows of a weight that fill the device by themselves
_ENOUGH_BLOCKS = 128  # of a weight that needs no sections
_MOST_PROGRAMS = 320  # of a product whose sections run side by side
_LEAST_CHUNKS = 16  # of a section that is cut in two; a quarter of it below `_FEW_PROGRAMS`
_FEW_PROGRAMS = 64
_MOST_BYTES_SIDE_BY_SIDE = 64 * 2**20  # of the sums that sections leave


def block_shape(num_rows: int, weight: Tensor | PackedWeight) -> Shape:
    """Block sizes for a linear map of `num_rows` rows, as measured on Hopper."""
    is_wide = weight.shape[1] >= _WIDE
    if not isinstance(weight, PackedWeight):
        rows = min(max(triton.next_power_of_2(num_rows), 16), 128 if is_wide else 64)
        if is_wide and num_rows <= 8:
            return Shape(8, 128, 4, 4)
        return Shape(rows, 128, 3, 8) if is_wide and rows > 32 else Shape(rows, 64, 4, 4)
    if num_rows <= 8:
        if is_wide:
            return Shape(8, 128, 3, 4)
        programs = triton.cdiv(weight.shape[1], TILE_ROWS) * sections_of(weight)
        return Shape(8, 32, 6, 2) if programs <= _ENOUGH_BLOCKS else Shape(8, 64, 4, 4)
    if num_rows <= 32:
        return Shape(16 if num_rows <= 16 else 32, 128 if is_wide else 64, 3 if is_wide else 4, 4)
    if num_rows <= 64:
        return Shape(64, 128, 3, 4) if is_wide else Shape(64, 64, 4, 4)
    if num_rows <= 96:
        return Shape(64, 128 if is_wide else 64, 3, 4, more=32)
    return Shape(128, 256, 3, 8) if is_wide and weight.shape[1] % 256 == 0 else Shape(128, 64, 3, 4)


def sections_of(weight: Tensor | PackedWeight) -> int:
    """Equal parts of the columns whose sums are added one after the other.

    A narrow weight has too few blocks of rows to keep the memory busy; its sections may then run side by side. Their
    number follows from the weight's shape alone, so it is part of the product's meaning and not of a call.
    """
    num_experts, width, depth = weight.shape
    blocks, chunks = triton.cdiv(width, TILE_ROWS), triton.cdiv(depth, CHUNK)
    if num_experts > 1 or blocks >= _ENOUGH_BLOCKS:
        return 1
    sections = 1
    while chunks % (sections * 2) == 0 and blocks * sections * 2 <= _MOST_PROGRAMS:
        if chunks // sections < (_LEAST_CHUNKS if blocks * sections >= _FEW_PROGRAMS else _LEAST_CHUNKS // 4):
            break
        sections *= 2
    return sections if isinstance(weight, PackedWeight) or depth % CHUNK == 0 else 1


def linear(x: Tensor, weight: Tensor | PackedWeight, out_dtype: torch.dtype | None = None, groups: int = 1) -> Tensor:
    """Product with a weight; see `dspark.ops.linear.linear`.

    Args:
        x: [T, groups * K]; bf16, or float32, which is taken apart into three bf16 rows and so used exactly.
        weight: packed or bf16 [N, K]; a float32 tensor goes to the slow product of single sums.
        out_dtype: of the result; that of `x` without it.
        groups: of the weight's rows, each with its own K columns of `x`.
    Returns:
        [T, N].
    """
    wanted = out_dtype or x.dtype
    if isinstance(weight, Tensor) and weight.dtype == torch.float32:
        return plain_product.linear(x, weight).to(wanted)
    stack = weight if isinstance(weight, PackedWeight) else packed(weight).unsqueeze(0)
    rows = prepared_rows(x, stack.shape[2], isinstance(stack, PackedWeight), groups)
    out = torch.empty(rows.shape[0], stack.shape[1], dtype=result_dtype(x, wanted), device=x.device)
    if x.shape[0]:
        dense_product(rows, stack, out, block_shape(rows.shape[0], stack), groups)
    if x.dtype == torch.float32:
        out = joined_parts(out)
    return out.to(wanted)


def quantised_linear(x: Tensor, weight: Tensor | PackedWeight, groups: int, quant_group: int) -> Tensor:
    """The same with each `quant_group` columns of the result quantised; by the product where its programs hold them."""
    is_exact = x.dtype == torch.float32 or (isinstance(weight, Tensor) and weight.dtype == torch.float32)
    if is_exact or not x.shape[0]:
        return quantise_fp8(linear(x, weight, groups=groups), quant_group)
    stack = weight if isinstance(weight, PackedWeight) else packed(weight).unsqueeze(0)
    shape, is_coded = block_shape(x.shape[0], stack), isinstance(stack, PackedWeight)
    leaves_sums = runs_side_by_side(sections_of(stack), x.shape[0], stack.shape[1])
    if not is_coded or leaves_sums or shape.columns % quant_group:
        return quantise_sum(product_parts(x, stack, groups=groups), quant_group, x)
    out = torch.empty(x.shape[0], stack.shape[1], dtype=result_dtype(x, x.dtype), device=x.device)
    rows = prepared_rows(x, stack.shape[2], True, groups)
    product(rows, stack, out, shape, groups=groups, sections=sections_of(stack), quant_group=quant_group)
    return out.to(x.dtype)


def dense_product(rows: Tensor, weight: Tensor | PackedWeight, out: Tensor, shape: Shape, groups: int) -> None:
    """A product without tiles into `out` [T, N]; its sections run side by side while their sums stay small."""
    count = sections_of(weight)
    if not runs_side_by_side(count, *out.shape):
        product(rows, weight, out, shape, groups=groups, sections=count)
        return
    parts = torch.empty(count, *out.shape, dtype=torch.float32, device=out.device)
    product(rows, weight, parts, shape, groups=groups, sections=count)
    add_parts(parts, out, early_launch())


def runs_side_by_side(sections: int, num_rows: int, width: int) -> bool:
    """Whether sections run side by side and leave their sums; else one program takes them one after the other."""
    return sections > 1 and 4 * sections * num_rows * width <= _MOST_BYTES_SIDE_BY_SIDE


def product_parts(
    x: Tensor, weight: Tensor | PackedWeight, out_dtype: torch.dtype | None = None, groups: int = 1
) -> Tensor:
    """[sections, T, N] sums of bf16 rows and a weight [1, N, K], for a kernel that adds them from first to last.

    float32 wherever the weight has several sections, also where so many rows share the call that they come added: how
    a kernel shares a reduction out among its threads follows from the type of what it reads, and no bit of a row may
    hang on the call. A single section is in `out_dtype`, that of `x` without it.
    """
    rows = prepared_rows(x, weight.shape[2], isinstance(weight, PackedWeight), groups)
    shape, count = block_shape(rows.shape[0], weight), sections_of(weight)
    dtype = torch.float32 if count > 1 else result_dtype(x, out_dtype or x.dtype)
    left = count if runs_side_by_side(count, rows.shape[0], weight.shape[1]) else 1
    sums = torch.empty(left, rows.shape[0], weight.shape[1], dtype=dtype, device=x.device)
    product(rows, weight, sums if left > 1 else sums[0], shape, groups=groups, sections=count)
    return sums


def joint_sums(x: Tensor, weights: Sequence[Tensor | PackedWeight]) -> Tensor:
    """See `dspark.ops.kept_rows.joint_sums`; sections of a single weight are left to whoever reads the sums."""
    weight = weights[0]
    is_plain = isinstance(weight, Tensor) and weight.dtype == torch.float32
    if len(weights) > 1 or is_plain or x.dtype == torch.float32 or not x.shape[0]:
        return torch.cat([linear(x, part) for part in weights], dim=1).unsqueeze(0)
    return product_parts(x, packed(weight).unsqueeze(0) if isinstance(weight, Tensor) else weight)


def result_dtype(x: Tensor, wanted: torch.dtype) -> torch.dtype:
    """What a kernel writes; the interpreter's stores truncate, and parts of float32 rows are still to be added."""
    return torch.float32 if INTERPRETED or x.dtype == torch.float32 else wanted


def prepared_rows(x: Tensor, depth: int, in_chunks: bool, groups: int = 1) -> Tensor:
    """bf16 rows as the kernels read them: the parts of float32 rows stacked, columns filled up to whole chunks."""
    if x.dtype == torch.float32:
        x = torch.cat(bf16_parts(x))
    if in_chunks and depth % CHUNK:
        x = F.pad(x.unflatten(1, (groups, depth)), (0, -depth % CHUNK)).flatten(1)
    return packed(x)


def bf16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bf16 tensors whose sum is the float32 tensor `x`, largest first."""
    first = x.to(torch.bfloat16)
    rest = x - first.float()
    second = rest.to(torch.bfloat16)
    return first, second, (rest - second.float()).to(torch.bfloat16)


def joined_parts(products: Tensor) -> Tensor:
    """[3 T, N] products of the parts of rows -> [T, N], smallest parts first."""
    first, second, third = products.chunk(3)
    return (third + second) + first
