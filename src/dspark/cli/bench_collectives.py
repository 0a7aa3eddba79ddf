"""`dspark bench collectives`: what ranks that share a model pay for each other."""

import json
import sys
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.collectives import ROW_COUNTS, CollectiveReport, run_collective_bench
from dspark.cli import options
from dspark.cli.console import print_report
from dspark.config.errors import DSparkError
from dspark.engine.device import engine_facts
from dspark.engine.machine import processor


def collectives(
    tp: Annotated[int, typer.Option("--tp", help="Ranks, each on an accelerator of its own.")] = 2,
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help=f"Rows of a call; may be repeated. {ROW_COUNTS} without it.")
    ] = None,
    on_cpu: Annotated[bool, typer.Option("--cpu", help="Between processes of this machine instead.")] = False,
    as_json: options.Json = False,
) -> None:
    """Microseconds of sums and exchanges between ranks, and whether their bits are right; the last line is JSON."""
    most = engine_facts().max_ranks
    if not 2 <= tp <= most:
        raise DSparkError(f"--tp is {tp}: give 2 to {most}")
    options.require_positive(rows=min(rows or [1]))
    report = run_collective_bench(tp, tuple(rows) if rows else ROW_COUNTS, "cpu" if on_cpu else "cuda")
    machine = report.machine
    place = f"{processor(machine)}, {report.num_ranks} ranks, torch {machine['torch']}"
    lines = [place, *([report.remark] if report.remark else [])]
    if not as_json:
        print_report(None, [_table(report)], lines)
    sys.stdout.write(json.dumps(report.as_json()) + "\n")


def _table(report: CollectiveReport) -> Table:
    table = Table(title="sums and exchanges", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("operation")
    table.add_column("way")
    for heading in ("rows", "kB a rank", "us", "exact"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        exact = "yes" if row.is_exact else "NO"
        table.add_row(row.operation, row.way, str(row.num_rows), f"{row.num_bytes / 1e3:,.0f}", f"{row.us:.1f}", exact)
    return table
