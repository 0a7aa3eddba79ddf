"""The only reader of the environment: a few preferences of the user's machine, never a setting of the engine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """Preferences read once at start-up.

    Args:
        home: where dspark keeps what it writes without being told where (profiles, reports); DSPARK_HOME.
        no_color: print without colour; NO_COLOR, set to anything but the empty string.
    """

    home: Path
    no_color: bool = False


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The preferences of this process, or of a given mapping."""
    source = os.environ if environ is None else environ
    home = source.get("DSPARK_HOME", "")
    return Environment(
        home=Path(home).expanduser() if home else Path("~/.dspark").expanduser(),
        no_color=bool(source.get("NO_COLOR", "")),
    )
