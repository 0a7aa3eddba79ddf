"""`dspark bench`: measure modes against each other in one run."""

from pathlib import Path
from typing import Annotated

import typer

from dspark.bench.generate import GenerateReport, run_generate_bench
from dspark.bench.plot import plot_generate
from dspark.bench.prompts import DOMAINS, load_prompts
from dspark.bench.table import generate_lines, generate_tables
from dspark.cli import exit_codes, options
from dspark.cli.bench_acceptance import acceptance
from dspark.cli.bench_collectives import collectives
from dspark.cli.bench_decode import decode
from dspark.cli.bench_host import host
from dspark.cli.bench_inputs import as_item, check_plot
from dspark.cli.bench_kernels import kernels
from dspark.cli.bench_rows import rows
from dspark.cli.bench_serve import serve
from dspark.cli.bench_soak import soak
from dspark.cli.console import note, print_report, progress
from dspark.cli.files import write_whole
from dspark.cli.options import DraftChoice
from dspark.cli.session import device_of, model_name, open_llm, require_speculation

bench_app = typer.Typer(help="Measure modes against each other in one run.", no_args_is_help=True)
bench_app.command("acceptance")(acceptance)
bench_app.command("rows")(rows)
bench_app.command("kernels")(kernels)
bench_app.command("collectives")(collectives)
bench_app.command("decode")(decode)
bench_app.command("host")(host)
bench_app.command("serve")(serve)
bench_app.command("soak")(soak)


@bench_app.command("generate")
def generate(
    model: options.Model = None,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", help=f"One of {', '.join(DOMAINS)}; may be repeated.")
    ] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", help="Prompts of each domain; all without it.")] = None,
    max_tokens: options.MaxTokens = 96,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each mode for each prompt.")] = 2,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    plot: options.Plot = None,
) -> None:
    """Plain decoding against DSpark on held-out prompts by domain; fails when one token differs."""
    chosen = load_prompts(domain or DOMAINS, prompts)
    params = options.sampling_params(temperature, 1.0, 0, 0.0, seed, max_tokens, None)
    if plot is not None:
        check_plot(plot)
    drafted = open_llm(model, DraftChoice.DSPARK)
    require_speculation(drafted, "this benchmark")
    plain = open_llm(model, DraftChoice.OFF, is_companion=True)
    items = [as_item(drafted, prompt, model) for prompt in chosen]
    with progress() as display:
        task = display.add_task("prompts", total=len(items))
        report = run_generate_bench(
            plain,
            drafted,
            items,
            params,
            model=model_name(model),
            device=device_of(drafted),
            repeats=repeats,
            on_prompt=lambda measurement: display.advance(task),
        )
    _publish(report, as_json, plot)
    if report.is_interrupted:
        raise typer.Exit(exit_codes.INTERRUPTED)
    if not report.is_identical:
        raise typer.Exit(exit_codes.FAILED)


def _publish(report: GenerateReport, as_json: bool, plot: Path | None) -> None:
    if plot is not None:
        write_whole(plot, plot_generate(report))
        note(f"wrote {plot}")
    if report.is_interrupted:
        note(f"interrupted after {report.total.num_prompts} prompts")
    print_report(report.as_json() if as_json else None, generate_tables(report), generate_lines(report))
