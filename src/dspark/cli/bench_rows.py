"""`dspark bench rows`: what it costs that a row's bits do not depend on the rows beside it."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.row_law import ROW_COUNTS, RowLawReport, run_row_law_bench
from dspark.cli import options
from dspark.cli.console import print_report, progress
from dspark.cli.options import DraftChoice
from dspark.cli.session import model_folder, model_name, open_llm

_TEXT = "The rows of a pass are computed side by side, and none of them knows how many others there are. "


def rows(
    model: options.Model = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed passes of each kind at each row count.")] = 15,
    as_json: options.Json = False,
) -> None:
    """A target pass with the engine's products against the library's own: time, and rows whose bits change."""
    options.require_positive(repeats=repeats)
    llm = open_llm(model, DraftChoice.OFF)
    token_ids = llm.tokenizer.encode(_TEXT * 16)[: max(ROW_COUNTS)]
    with progress() as display:
        task = display.add_task("row counts", total=len(ROW_COUNTS))
        report = run_row_law_bench(
            model_folder(model), model_name(model), token_ids, repeats, lambda: display.advance(task)
        )
    machine = report.machine
    place = f"{report.model}, {machine['cpu']}, {machine['torch_threads']} threads, torch {machine['torch']}"
    print_report(report.as_json() if as_json else None, [_table(report)], [place])


def _table(report: RowLawReport) -> Table:
    table = Table(title="one target pass, medians", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("rows", "exact ms", "library ms", "exact/library", "exact changed", "library changed"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        cells = (f"{row.exact_ms:.1f}", f"{row.library_ms:.1f}", f"{row.ratio:.2f}")
        table.add_row(str(row.num_rows), *cells, str(row.exact_changed), str(row.library_changed))
    return table
