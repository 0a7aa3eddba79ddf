"""What ranks do together, and the group of one rank, in which all of it is nothing."""

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """Ranks that run the same passes side by side; each call is made by all of them, in the same order.

    Results have the same bits on every rank. An element of a sum depends on the ranks' own elements alone: how many
    others are summed in the same call, and on which way they travel, changes nothing.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum of all ranks' tensors of one shape and floating dtype.

        The ranks' values are added in float32 in the order of ranks and rounded once, to the dtype of `x`.
        """
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """[T, n] of every rank, side by side in the order of ranks: [T, size * n]."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source`, of any dtype; the others give one of the same shape and dtype."""
        ...


class SingleRank:
    """A rank without others."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """`x`."""
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """`x`."""
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`x`."""
        return x


ALONE = SingleRank()
