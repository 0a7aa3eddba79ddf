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
        has_thread_count: the user has chosen CPU threads; OMP_NUM_THREADS or MKL_NUM_THREADS, read by torch itself.
    """

    home: Path
    no_color: bool = False
    has_thread_count: bool = False


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The preferences of this process, or of a given mapping."""
    source = os.environ if environ is None else environ
    home = source.get("DSPARK_HOME", "")
    return Environment(
        home=Path(home).expanduser() if home else Path("~/.dspark").expanduser(),
        no_color=bool(source.get("NO_COLOR", "")),
        has_thread_count=bool(source.get("OMP_NUM_THREADS", "") or source.get("MKL_NUM_THREADS", "")),
    )
