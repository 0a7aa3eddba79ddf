"""`dspark bench kernels`: what share of the memory bandwidth the exact products reach at real shapes."""

import importlib
import importlib.util
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.kernel_shapes import ROW_COUNTS
from dspark.cli import options
from dspark.cli.console import print_report, progress
from dspark.config.errors import DSparkError

if TYPE_CHECKING:
    from dspark.bench.kernels import KernelReport


def kernels(
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help=f"Rows of a call; may be repeated. {ROW_COUNTS} without it.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time and bandwidth of each product on an accelerator; the last line is one JSON object."""
    options.require_positive(rows=min(rows or [1]))
    if importlib.util.find_spec("triton") is None:
        raise DSparkError("the kernels are written in triton, which is not installed: it comes with torch's CUDA build")
    bench = importlib.import_module("dspark.bench.kernels")
    with progress() as display:
        task = display.add_task("kernels", total=bench.num_cases())

        def next_case(name: str) -> None:
            display.update(task, description=name, advance=1)

        report = bench.run_kernel_bench(tuple(rows) if rows else ROW_COUNTS, on_case=next_case)
    if not as_json:
        print_report(None, _tables(report), [_place(report)])
    sys.stdout.write(json.dumps(report.as_json()) + "\n")


def _tables(report: "KernelReport") -> list[Table]:
    return [_table(report, name) for name in dict.fromkeys(row.geometry for row in report.rows)]


def _table(report: "KernelReport", geometry: str) -> Table:
    table = Table(title=f"products, {geometry}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("kernel")
    table.add_column("weights")
    for heading in ("rows", "MB", "us", "TB/s", "of copy", "of a copy this size", "library bf16 us", "exact"):
        table.add_column(heading, justify="right")
    for row in (row for row in report.rows if row.geometry == geometry):
        same_size = "" if row.moving_us is None else f"{row.moving_us / row.kernel_us:.0%}"
        table.add_row(
            row.kernel,
            row.form,
            str(row.num_rows),
            f"{row.num_bytes / 1e6:.1f}",
            f"{row.kernel_us:.1f}",
            f"{row.terabytes_per_second:.2f}",
            f"{report.share(row):.0%}",
            same_size,
            "" if row.library_us is None else f"{row.library_us:.1f}",
            "yes" if row.is_exact else "NO",
        )
    return table


def _place(report: "KernelReport") -> str:
    machine = report.machine
    copy = f"a large copy moves {report.copy_bandwidth / 1e12:.2f} TB/s"
    return f"{machine['gpu']}, torch {machine['torch']}; {copy}"
