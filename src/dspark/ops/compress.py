"""Compression of token rows into one row a group: what a pass completes, and the pooling of a group's rows."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.ops.rows import write_rows


@dataclass(frozen=True)
class PoolShape:
    """Which columns of a product a compressor reads, and how it pools.

    Attributes:
        column: first of its columns: `projected` values, then as many gates where it `is_gated`.
        width: channels of a compressed row. ratio: tokens of a group.
        overlap: the group before gives its first `width` channels, the own one its second.
    """

    column: int
    width: int
    ratio: int
    overlap: bool
    is_gated: bool

    @property
    def projected(self) -> int:
        """Channels of the values of a token."""
        return self.width * (2 if self.overlap else 1)

    @property
    def reach(self) -> int:
        """Token rows that one compressed row pools."""
        return self.ratio * (2 if self.overlap else 1)


class Groups(Protocol):
    """The groups that a pass completes in one store.

    Attributes:
        positions: [C] int64, of the first token of each group. row_positions: [T] int64, of the rows of the pass.
    """

    @property
    def positions(self) -> Tensor: ...

    @property
    def row_positions(self) -> Tensor: ...

    def exchange(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the compressor inputs [T, D] of the pass.

        Returns:
            inputs of the groups [C, reach, D], 0 where none exists, and which exist [C, reach].
        """
        ...

    def keep(self, rows: Tensor) -> None:
        """Write the compressed rows [C, K]."""
        ...


@dataclass(frozen=True, eq=False)
class GroupRows:
    """`Groups` by places in stores, as kernels read them.

    Attributes:
        store: [N, K], gets the compressed rows. places: [C] int64 in it; -1 where there is no group after all.
        tail: [N, D] float32, inputs of open groups; None where a group is a token.
        kept: [T] int64, where the rows of the pass go in `tail`; -1 nowhere.
        members: [C, reach] int64: below N in the tail as it was before the pass, N + t is row t of the pass, -1 none.
        at_once: no row of the pass goes where a member lies, so rows may be kept while groups are still read.
    """

    positions: Tensor
    row_positions: Tensor
    store: Tensor
    places: Tensor
    tail: Tensor | None
    kept: Tensor
    members: Tensor
    at_once: bool

    def exchange(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Groups.exchange`."""
        assert self.tail is not None
        count = self.tail.shape[0]
        is_own = (self.members >= count).unsqueeze(-1)
        old = self.tail[self.members.clamp(0, count - 1)]
        inputs = torch.where(is_own, rows[(self.members - count).clamp(min=0)], old)
        exists = self.members >= 0
        write_rows(self.tail, self.kept, rows)
        # A row that does not exist weighs nothing, but zero times what is not a number is not zero.
        return inputs.masked_fill_(~exists.unsqueeze(-1), 0.0), exists

    def keep(self, rows: Tensor) -> None:
        """See `Groups.keep`."""
        write_rows(self.store, self.places, rows)


def pool_groups(values: Tensor, gates: Tensor) -> Tensor:
    """Per-channel softmax of the gates over a group's rows, applied to the values, in float32.

    Args:
        values: [C, M, K]. gates: [C, M, K]; -inf removes a row (the missing predecessor of a first group).
    Returns:
        [C, K] float32.
    """
    weights = torch.exp(gates - gates.amax(1, keepdim=True))
    return (values * (weights / weights.sum(1, keepdim=True))).sum(1)
