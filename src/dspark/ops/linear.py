"""Matrix products whose rows keep their bits whatever the number of rows.

A vendor product picks its kernel by shape, and another kernel means another order of additions. Here every
product has the shape [ROW_TILE, K] x [K, N]: rows are padded to whole tiles and the tiles form a batch.
Example: 11 rows become 2 tiles of 8; row 9 is row 1 of tile 1, computed exactly as it would be alone.

For products with fewer than MIN_COLUMNS columns the vendor's kernels also treat the rows of one tile unequally, so a
row would change with its place in the tile. There each element is a sum of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 8
MIN_COLUMNS = 16
MIN_DEPTH = 4


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product with a weight, accumulated in float32.

    Args:
        x: [T, K], any float dtype.
        weight: [N, K]; float32 holding the stored values.
    Returns:
        [T, N] in the dtype of `x`.
    """
    num_rows, depth = x.shape
    rows = x.float()
    if weight.shape[0] < MIN_COLUMNS or depth < MIN_DEPTH:
        return (rows.unsqueeze(1) * weight).sum(-1).to(x.dtype)
    padding = -num_rows % ROW_TILE
    if padding:
        rows = F.pad(rows, (0, 0, 0, padding))
    if rows.shape[0] == ROW_TILE:
        return torch.mm(rows, weight.t())[:num_rows].to(x.dtype)
    tiles = rows.reshape(-1, ROW_TILE, depth)
    weights = weight.t().expand(tiles.shape[0], depth, weight.shape[0])
    return torch.bmm(tiles, weights).flatten(0, 1)[:num_rows].to(x.dtype)


def batched_product(left: Tensor, right: Tensor) -> Tensor:
    """Independent products [B, M, K] x [B, K, N] -> [B, M, N], N >= MIN_COLUMNS; M is padded to whole row tiles."""
    num_rows = left.shape[1]
    padding = -num_rows % ROW_TILE
    if padding:
        left = F.pad(left, (0, 0, 0, padding))
    return torch.bmm(left, right)[:, :num_rows]
