"""Where the parts of a round begin and end, for whoever measures them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

Phase = Literal["target", "sampling", "draft"]


class PhaseListener(Protocol):
    """Is told of phases; must not change anything."""

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Entered where the work of a phase is given to the device, left when all of it has been given."""
        ...


class Stopwatch:
    """Marks phases; without a listener that costs nothing.

    Attributes:
        listener: who is told. While there is one, a round on the device is launched in as many parts as it has phases.
    """

    def __init__(self) -> None:
        self.listener: PhaseListener | None = None

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """The span of one phase."""
        return self.listener.phase(name) if self.listener else nullcontext()
