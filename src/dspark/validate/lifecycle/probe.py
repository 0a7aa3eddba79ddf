"""What a probe came to."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProbeResult:
    """One property, checked many times.

    Attributes:
        num_compared: comparisons, or draws.
        message: what was found.
    """

    name: str
    is_ok: bool
    num_compared: int
    message: str

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self)
