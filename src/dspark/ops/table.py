"""Rows of a large table as it is stored, wherever it lies: a few of them are read for each token, the rest never."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

TABLE_GROUP = 32  # columns that share a scale


class TablePlace(StrEnum):
    """Where a table lies.

    DEVICE: beside the weights. PINNED: in memory of the host that kernels of an accelerator read. MAPPED: in its file,
    of which the host reads rows when they are asked for.
    """

    DEVICE = "device"
    PINNED = "pinned"
    MAPPED = "mapped"


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table [N, K].

    Attributes:
        values: [N, K] e4m3 codes as uint8, or bf16 values.
        scales: [N, ceil(K / 32)] exponent fields as uint8, of codes; None for values.
        place: where both lie.
    """

    values: Tensor
    scales: Tensor | None
    place: TablePlace

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to(self, device: torch.device | str) -> "StoredTable":
        """The same on another device; a table of the host stays where it is."""
        if self.place is not TablePlace.DEVICE:
            return self
        scales = None if self.scales is None else self.scales.to(device)
        return StoredTable(self.values.to(device), scales, self.place)


def table_rows(table: Tensor | StoredTable, index: Tensor) -> Tensor:
    """Rows of a table: exactly the stored values.

    Args:
        table: [N, K]. index: [..] int64.
    Returns:
        [.., K] float32, where `index` lies.
    """
    if isinstance(table, Tensor):
        return table[index]
    places = index.to(table.values.device)
    rows = table.values[places]
    if table.scales is None:
        return rows.float().to(index.device)
    factors = table.scales[places].view(torch.float8_e8m0fnu).float().repeat_interleave(TABLE_GROUP, dim=-1)
    return (rows.view(torch.float8_e4m3fn).float() * factors[..., : rows.shape[-1]]).to(index.device)
