"""The command line: one file a command; `main` is the console script."""

import os
import signal
from importlib import import_module
from types import FrameType

from dspark.cli import exit_codes

__all__ = ["main"]


def main() -> None:
    """Run the program. Its imports take seconds, in which Ctrl-C already ends it in silence."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        # Not an exception: some libraries swallow one while they are imported.
        signal.signal(signal.SIGINT, _leave)
    program = import_module("dspark.cli.app")
    signal.signal(signal.SIGINT, interrupt)
    program.main()


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(exit_codes.INTERRUPTED)
