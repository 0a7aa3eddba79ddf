"""What may go wrong between ranks, and how long anything may take."""

from dataclasses import dataclass

from dspark.config.errors import DSparkError

# A call whose duration is known may take this many times the longest one before.
_PATIENCE = 20.0


class RankError(DSparkError):
    """A rank has ended or does not answer, and the engine with it; the sentence names the rank."""


@dataclass(frozen=True)
class TimeLimits:
    """How long ranks wait for each other, in seconds.

    Attributes:
        call_s: for a sign of life, and for a call like one that has ended before.
        setup_s: for loading, and for the first call of a kind, which may compile kernels and capture graphs.
    """

    call_s: float = 10.0
    setup_s: float = 600.0

    @property
    def beat_s(self) -> float:
        """Between two signs of life."""
        return min(self.call_s / 4, 0.5)

    def of_call(self, longest_s: float | None) -> float:
        """For a call, given the longest one of its kind so far; None where there was none."""
        return self.setup_s if longest_s is None else max(self.call_s, _PATIENCE * longest_s)
