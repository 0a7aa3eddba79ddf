"""Where text goes: results to stdout, everything about them to stderr, colour only where the terminal has it."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dspark.config.environment import read_environment

# The text of accepted drafts; the target's own tokens keep the terminal's colour.
ACCEPTED_STYLE = "green"
# Columns of a table that goes to a file or a pipe, which have no width of their own.
_FILE_WIDTH = 120


def _console(*, stderr: bool) -> Console:
    no_color = True if read_environment().no_color else None
    console = Console(stderr=stderr, no_color=no_color, highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


out = _console(stderr=False)
err = _console(stderr=True)


def has_color() -> bool:
    """Can stdout show the two origins of tokens in two colours?"""
    return out.is_terminal and out.color_system is not None and not out.no_color


def note(sentence: str) -> None:
    """Tell the user something about the run, beside its result."""
    err.print(sentence, style="dim")


def fail(sentence: str) -> None:
    """Print the one sentence that explains a failure."""
    err.print(f"error: {sentence}", style="red")


def print_json(report: Any) -> None:
    """Write a report for programs to stdout, and nothing else."""
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_report(report: Any | None, tables: Sequence[Table], lines: Sequence[str]) -> None:
    """Print a report for programs where there is one, else tables and lines for people."""
    if report is not None:
        print_json(report)
        return
    for table in tables:
        out.print(table)
    for line in lines:
        out.print(line)


def progress() -> Progress:
    """A progress display on stderr that leaves no trace, and shows nothing where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
