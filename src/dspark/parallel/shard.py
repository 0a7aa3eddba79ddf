"""Which part of every divided dimension one rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model: equal parts of every divided dimension, in the order of ranks.

    Attributes:
        rank, size: this rank, from 0, and how many there are.
        whole_experts: a rank holds whole routed experts instead of a part of each.
    """

    rank: int = 0
    size: int = 1
    whole_experts: bool = False

    def part(self, size: int) -> range:
        """This rank's part of a dimension that the ranks divide."""
        share = size // self.size
        return range(self.rank * share, (self.rank + 1) * share)


WHOLE = Shard()
