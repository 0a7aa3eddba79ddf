"""`dspark validate`: check the engine against reference numbers, and against itself."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.cli import exit_codes, options
from dspark.cli.console import fail, out, print_json, progress
from dspark.cli.validate_lifecycle import lifecycle
from dspark.cli.validate_runtime import runtime
from dspark.validate.golden import DTYPES, Check, GoldenReport, validate_case

validate_app = typer.Typer(help="Check the engine against reference numbers and against itself.", no_args_is_help=True)
validate_app.command("lifecycle")(lifecycle)
validate_app.command("runtime")(runtime)


class DtypeChoice(StrEnum):
    """Activations to compare with."""

    FP32 = "fp32"
    BF16 = "bf16"
    BOTH = "both"


@validate_app.command("golden")
def golden(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of golden cases.")],
    dtype: Annotated[DtypeChoice, typer.Option("--dtype", help="Activations to compare with.")] = DtypeChoice.BOTH,
    as_json: options.Json = False,
) -> None:
    """Compare a checkpoint's logits, features, hashes, drafts and tokens with a reference's; exits 1 on a miss."""
    dtypes = tuple(DTYPES) if dtype is DtypeChoice.BOTH else (dtype.value,)
    reports = []
    with progress() as display:
        task = display.add_task("cases", total=len(folders))
        for folder in folders:
            reports.append(validate_case(folder, dtypes))
            display.advance(task)
    if as_json:
        print_json([report.as_json() for report in reports])
    else:
        for report in reports:
            _show(report)
    missed = [report.case for report in reports if not report.is_ok]
    if missed:
        fail(f"{len(missed)} of {len(reports)} cases miss the reference: {', '.join(missed)}")
        raise typer.Exit(exit_codes.FAILED)


def _show(report: GoldenReport) -> None:
    """One line a quantity."""
    table = Table(title=report.case, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("dtype", "run", "quantity"):
        table.add_column(heading)
    table.add_column("rows", justify="right")
    table.add_column("largest error", justify="right")
    table.add_column("verdict")
    for check in report.checks:
        table.add_row(*_cells(check), style=None if check.is_ok else "red")
    out.print(table)


def _cells(check: Check) -> list[str]:
    error = "-" if check.largest_error is None else f"{check.largest_error:.2e}"
    verdict = "ok" if check.is_ok else "MISS"
    rows = f"{check.num_compared}/{check.num_rows}"
    return [check.dtype, check.run, check.quantity, rows, error, f"{verdict}: {check.measured}"]
