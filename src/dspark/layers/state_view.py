"""What a layer asks of the state: the protocol that stores of any kind implement for one pass.

A pass has T rows, ordered by request; each request's rows are a span of consecutive positions. Keys name stores:
a layer's own name, with a suffix where it has several.
"""

from typing import Protocol

from torch import Tensor

from dspark.ops.attention import Sources
from dspark.ops.compress import Groups
from dspark.ops.index import IndexKeys


class StateView(Protocol):
    """Reads and tentative writes of one pass."""

    positions: Tensor

    def window_keys(self, key: str, rows: Tensor) -> Sources:
        """Write the pass's window rows [T, K]; return stores [N, K], each with its part [T, J] of every query's window.

        Rows that are in their ring already come as that ring. -1 in a window is no key.
        """
        ...

    def groups(self, key: str, ratio: int, reach: int) -> Groups:
        """The groups of `ratio` tokens, pooled from `reach`, that this pass completes in a store."""
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

    def visible_places(self, ratio: int) -> Tensor:
        """Places in `appended` of all compressed rows that each query sees: [T, J], -1 behind them."""
        ...

    def addresses(self, ratio: int, rows: Tensor) -> Tensor:
        """Places in `appended` of each query's own compressed rows [T, J] (-1 stays -1)."""
        ...

    def index_keys(self, key: str, ratio: int) -> IndexKeys:
        """The index keys in a store of every request, and which queries they are for."""
        ...
