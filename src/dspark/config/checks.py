"""Small checks that config dataclasses share: each raises a ConfigError which names the field and its value."""

import math
from collections.abc import Sequence
from typing import Any

from dspark.config.errors import ConfigError


def require_int(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> None:
    """Refuse what is not an int in [low, high]; a bool is not an int here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, not {value!r}")
    _require_range(name, value, low, high)


def require_number(
    name: str, value: Any, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> None:
    """Refuse what is not a finite number in [low, high] and greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, not {value!r}")
    if above is not None and value <= above:
        raise ConfigError(f"{name} must be greater than {above}, not {value!r}")
    _require_range(name, value, low, high)


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse what is not one of the spelt-out choices."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def require_bool(name: str, value: Any) -> None:
    """Refuse what is not True or False: a string "false" would otherwise count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")


def _require_range(name: str, value: float, low: float | None, high: float | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        if high is None:
            wanted = f"at least {low}"
        elif low is None:
            wanted = f"at most {high}"
        else:
            wanted = f"between {low} and {high}"
        raise ConfigError(f"{name} must be {wanted}, not {value!r}")
