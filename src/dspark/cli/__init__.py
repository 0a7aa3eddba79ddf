"""The command line: one file a command; `main` is the console script."""

from dspark.cli.app import main

__all__ = ["main"]
