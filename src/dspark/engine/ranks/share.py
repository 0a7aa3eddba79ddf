"""A share of an engine on every rank: rank 0's own part here, the followers' parts by number."""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dspark.engine.ranks.team import Team

Part = TypeVar("Part")
OtherPart = TypeVar("OtherPart")


class Share(Generic[Part]):
    """The parts of one kind on all ranks; the followers forget theirs when this object is gone.

    Attributes:
        own: rank 0's part.
    """

    def __init__(self, team: Team, number: int, own: Part) -> None:
        self.team = team
        self.own = own
        self._number = number
        if number:
            weakref.finalize(self, team.forget, number)

    def derive(self, make: "Callable[..., OtherPart]", *args: Any) -> "Share[OtherPart]":
        """Let every rank make another part by `make(part, *args)`; returns when all have.

        Raises:
            RankError, DSparkError: a rank could not, and the team has ended.
        """
        number, own = self.team.make(self._number, self.own, make, *args)
        return Share(self.team, number, own)

    def run(self, function: Callable[..., Any], *args: Any, kind: Any = None) -> Any:
        """Run `function(part, *args)` on every rank; returns rank 0's result. See `Team.run`."""
        return self.team.run(self._number, self.own, function, *args, kind=kind)

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function(part, *args)` on the followers alone; it may not hold a collective."""
        self.team.tell(self._number, function, *args)

    def ask(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of all ranks, which are plain values."""
        return self.team.ask(self._number, self.own, function, *args)
