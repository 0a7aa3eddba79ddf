"""`dspark bench host`: what the engine costs beside its passes."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.host import ENGINE_REQUESTS, SCHEDULER_REQUESTS, HostReport, run_host_bench
from dspark.cli import options
from dspark.cli.console import print_report, progress
from dspark.cli.session import model_name
from dspark.config.errors import DSparkError
from dspark.engine.assembly import assemble

_TEXT = "Rows are planned, passes are run, tokens are told. "


def host(
    model: options.Model = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time for each figure.")] = 3.0,
    as_json: options.Json = False,
) -> None:
    """The scheduler alone, and steps over a model that computes nothing beside steps over the real one."""
    if not 0 < seconds <= 600:
        raise DSparkError(f"--seconds is {seconds:g}: give a number above 0 and at most 600")
    assembly = assemble(model)
    token_ids = assembly.tokenizer.encode(_TEXT * 3)
    with progress() as display:
        task = display.add_task("figures", total=len(SCHEDULER_REQUESTS) + len(ENGINE_REQUESTS))
        report = run_host_bench(assembly, model_name(model), token_ids, seconds, lambda: display.advance(task))
    machine = report.machine
    place = f"{report.model}, {machine['cpu']}, {machine['torch_threads']} threads, torch {machine['torch']}"
    print_report(report.as_json() if as_json else None, [_scheduler_table(report), _engine_table(report)], [place])


def _scheduler_table(report: HostReport) -> Table:
    table = Table(title="the scheduler alone", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("requests", "steps/s", "us/step"):
        table.add_column(heading, justify="right")
    for row in report.scheduler:
        table.add_row(str(row.num_requests), f"{row.steps_per_second:,.0f}", f"{1e6 / row.steps_per_second:.0f}")
    return table


def _engine_table(report: HostReport) -> Table:
    table = Table(title="one decode step", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("requests", "host ms", "host us/token", "with model ms", "tokens", "host share"):
        table.add_column(heading, justify="right")
    for row in report.engine:
        table.add_row(
            str(row.num_requests),
            f"{row.host_ms:.2f}",
            f"{row.host_us_per_token:.0f}",
            f"{row.model_ms:.1f}",
            f"{row.model_tokens:.1f}",
            f"{100 * row.host_share:.0f} %",
        )
    return table
