"""What a layer asks of the state: the protocol that stores of any kind implement for one pass.

A pass has T rows, ordered by request; each request's rows are a span of consecutive positions. Keys name stores:
a layer's own name, with a suffix where it has several.
"""

from typing import Protocol

from torch import Tensor

from dspark.ops.index import IndexKeys


class StateView(Protocol):
    """Reads and tentative writes of one pass."""

    positions: Tensor

    def window_keys(self, key: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Write the pass's window rows [T, K]; return all rows [N, K] and the window [T, W] of each query (-1 none)."""
        ...

    def group_positions(self, ratio: int) -> Tensor:
        """Position of the first token of each group of `ratio` tokens that this pass completes: [C] int64."""
        ...

    def group_inputs(self, key: str, rows: Tensor, ratio: int, reach: int) -> tuple[Tensor, Tensor]:
        """Write compressor inputs [T, D].

        Returns:
            inputs of the completed groups [C, reach, D], 0 where none exists, and which exist [C, reach].
        """
        ...

    def append(self, key: str, ratio: int, rows: Tensor) -> None:
        """Write the compressed rows [C, K] of the completed groups, in the order of `group_positions`."""
        ...

    def appended(self, key: str) -> Tensor:
        """All compressed rows of a store, of every request: [N, K]."""
        ...

    def visible(self, ratio: int) -> Tensor:
        """Compressed rows that each query may see: [T] int64, (position + 1) // ratio."""
        ...

    def max_visible(self, ratio: int) -> int:
        """The largest of `visible`, known to the host."""
        ...

    def addresses(self, ratio: int, rows: Tensor) -> Tensor:
        """Places in `appended` of each query's own compressed rows [T, J] (-1 stays -1)."""
        ...

    def index_keys(self, key: str, ratio: int) -> IndexKeys:
        """The index keys in a store of every request, and which queries they are for."""
        ...
