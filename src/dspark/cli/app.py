"""The program `dspark`: its commands, and what a failure prints and returns.

Exit codes are in `dspark.cli.exit_codes`.
"""

import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from dspark.cli import exit_codes
from dspark.cli.bench import bench_app
from dspark.cli.chat import chat
from dspark.cli.console import fail
from dspark.cli.doctor import doctor
from dspark.cli.generate import generate
from dspark.cli.roofline import roofline
from dspark.cli.serve import serve
from dspark.cli.train import train_app
from dspark.cli.validate import validate_app
from dspark.config.errors import DSparkError
from dspark.engine.ranks.failure import RankError
from dspark.version import __version__

app = typer.Typer(
    name="dspark",
    help="Exact inference with DSpark speculative decoding. Every command works on the embedded model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("generate")(generate)
app.command("chat")(chat)
app.command("serve")(serve)
app.add_typer(bench_app, name="bench")
app.add_typer(validate_app, name="validate")
app.add_typer(train_app, name="train")
app.command("roofline")(roofline)
app.command("doctor")(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dspark {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Hold the options of the program itself."""


def main() -> None:
    """Run the command line and exit; a user's mistake costs one sentence, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 still shows every text
    try:
        app()
    except RankError as error:
        fail(str(error))
        sys.exit(exit_codes.FAILED)
    except DSparkError as error:
        fail(str(error))
        sys.exit(exit_codes.REFUSED)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    except OSError as error:
        fail(f"{error.filename or 'the output'} cannot be read or written: {error.strerror or error}")
        _give_up_stdout()
        sys.exit(exit_codes.FAILED)


def _give_up_stdout() -> None:
    """Point stdout nowhere: what is still buffered would fail again at exit, with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
