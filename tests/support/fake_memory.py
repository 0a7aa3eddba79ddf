"""Memory of a made-up device: so much is free, and work takes what the test says."""

from collections.abc import Callable

from dspark.engine.device_memory import Room


class FakeMemory:
    """A `DeviceMemory` that does the work and reports a number.

    Attributes:
        works: how often something was measured.
    """

    def __init__(self, free: int, margin: int = 0, need: int | None = None) -> None:
        self.measures = need is not None
        self.works = 0
        self._room = Room("a made-up device", 2 * free, free, margin)
        self._need = need

    def room(self) -> Room:
        """What the test says."""
        return self._room

    def need_of(self, work: Callable[[], object]) -> int:
        """Do it, and say what the test says."""
        work()
        self.works += 1
        return self._need or 0
