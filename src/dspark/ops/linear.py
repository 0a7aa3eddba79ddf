"""Matrix products whose rows keep their bits whatever the number of rows.

A vendor product picks its kernel by shape, and another kernel may add in another order. So products are made of
tiles with a fixed number of rows, and which tile sizes give a row the same bits at every place is not assumed but
probed, once for each weight shape. Example: with tiles of 4, 8 and 16 rows, 11 rows are padded to one tile of 16;
row 9 has the bits that it has alone in a tile of 4. Where no tile size keeps its rows equal (products with very few
columns), each element is a sum of its own.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.quantise import quantise_fp8

TILE_ROWS = (4, 8, 16, 32, 64)
BASE_TILE = 8


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product with a weight, accumulated in float32.

    Args:
        x: [T, K], any float dtype.
        weight: [N, K]; float32 holding the stored values.
    Returns:
        [T, N] in the dtype of `x`.
    """
    num_rows = x.shape[0]
    rows = x.float().contiguous()  # the probe knows rows that lie one after the other
    tiles = usable_tiles(weight)
    if not tiles:
        return _separate_sums(rows, weight).to(x.dtype)
    size = _tile_of(num_rows, tiles)
    rows = _pad_rows(rows, size)
    product = F.linear(rows, weight) if rows.shape[0] == size else _tiled(rows, weight, size)
    return (product if rows.shape[0] == num_rows else product[:num_rows]).to(x.dtype)


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """The same with a float32 result, whatever the dtype of `x`."""
    return linear(x.float(), weight)


def grouped_linear_of(
    product: Callable[[Tensor, Tensor], Tensor], quantise: Callable[[Tensor, int], Tensor]
) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    """Products of equal parts, from the `linear` and the `quantise_fp8` of one set of twins."""

    def grouped_linear(x: Tensor, weight: Tensor, groups: int, quant_group: int) -> Tensor:
        """Part g of the rows of `weight` reads part g of the columns of `x`.

        Args:
            x: [T, groups * K]. weight: [groups * N, K].
            quant_group: columns that share a scale of the quantised result; 0 where it is not quantised.
        Returns:
            [T, groups * N] in the dtype of `x`.
        """
        pairs = zip(x.chunk(groups, dim=1), weight.chunk(groups), strict=True)
        out = torch.cat([product(part, own) for part, own in pairs], dim=1)
        return quantise(out, quant_group) if quant_group else out

    return grouped_linear


grouped_linear = grouped_linear_of(linear, quantise_fp8)


def computed_rows(num_rows: int, weight: Tensor) -> int:
    """Rows that a product of `num_rows` rows with `weight` [N, K] computes: whole tiles."""
    tiles = usable_tiles(weight)
    size = _tile_of(num_rows, tiles) if tiles else 1
    return -(-num_rows // size) * size


def _tile_of(num_rows: int, tiles: tuple[int, ...]) -> int:
    """The smallest tile that holds all rows, else the largest."""
    return next((tile for tile in tiles if tile >= num_rows), tiles[-1])


def batched_product(left: Tensor, right: Tensor) -> Tensor:
    """Independent products [B, M, K] x [B, K, N] -> [B, M, N], N at least 16; M is padded to whole base tiles."""
    num_rows = left.shape[1]
    padding = -num_rows % BASE_TILE
    if padding:
        left = F.pad(left, (0, 0, 0, padding))
    return torch.bmm(left, right)[:, :num_rows]


def usable_tiles(weight: Tensor) -> tuple[int, ...]:
    """Tile sizes in which rows of a product with `weight` [N, K] keep their bits at every place; () if none does."""
    key = (weight.shape, weight.stride(), torch.get_num_threads())
    if key not in _PROBED:
        _PROBED[key] = _probe(weight)
    return _PROBED[key]


_PROBED: dict[tuple[torch.Size, tuple[int, ...], int], tuple[int, ...]] = {}


def _probe(weight: Tensor) -> tuple[int, ...]:
    """Compare tiles of every size, at every rotation of their rows, with rows that were alone in a base tile."""
    rows = _probe_rows(weight.shape[1]).to(weight.device)
    alone = torch.cat([F.linear(_pad_rows(row, BASE_TILE), weight)[:1] for row in rows.split(1)])
    usable = []
    for size in TILE_ROWS:
        repeated = rows.repeat(-(-size // BASE_TILE), 1)[:size]
        wanted = alone.repeat(-(-size // BASE_TILE), 1)[:size]
        shifts = range(min(size, BASE_TILE))
        whole = all(torch.equal(F.linear(repeated.roll(s, 0), weight), wanted.roll(s, 0)) for s in shifts)
        twice = _tiled(repeated.repeat(2, 1), weight, size)
        if whole and torch.equal(twice, wanted.repeat(2, 1)):
            usable.append(size)
    return tuple(usable) if BASE_TILE in usable else ()


@lru_cache(maxsize=64)
def _probe_rows(depth: int) -> Tensor:
    """[BASE_TILE, depth] fixed random rows."""
    return torch.randn(BASE_TILE, depth, generator=torch.Generator().manual_seed(depth))


def _tiled(rows: Tensor, weight: Tensor, size: int) -> Tensor:
    """Whole tiles [n * size, K] as a batch: [n * size, N]."""
    tiles = rows.reshape(-1, size, rows.shape[1])
    weights = weight.t().expand(tiles.shape[0], -1, -1)
    return torch.bmm(tiles, weights).flatten(0, 1)


def _pad_rows(rows: Tensor, size: int) -> Tensor:
    """Rows followed by zero rows up to a multiple of `size`."""
    padding = -rows.shape[0] % size
    return torch.cat((rows, _zero_rows(padding, rows.shape[1], rows.device))) if padding else rows


@lru_cache(maxsize=256)
def _zero_rows(count: int, depth: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, depth, device=device)


def _separate_sums(rows: Tensor, weight: Tensor) -> Tensor:
    """Every element as a sum over its own products."""
    return (rows.unsqueeze(1) * weight).sum(-1)
