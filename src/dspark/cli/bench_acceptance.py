"""`dspark bench acceptance`: what is accepted of a drafter's proposals, and what its confidence is worth."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dspark.bench.acceptance import AcceptanceReport, Drafter, run_acceptance_bench, settings_for
from dspark.bench.acceptance_plot import plot_acceptance
from dspark.bench.acceptance_table import acceptance_lines, acceptance_tables
from dspark.bench.generate import Item
from dspark.bench.prompts import BenchPrompt
from dspark.cli import exit_codes, options
from dspark.cli.bench_inputs import as_item, check_plot, choose_prompts
from dspark.cli.console import note, print_report, progress
from dspark.cli.files import write_whole
from dspark.cli.options import DraftChoice
from dspark.cli.session import device_of, model_name, open_llm, require_speculation
from dspark.config.errors import DSparkError
from dspark.engine import LLM


class SamplerChoice(StrEnum):
    """How tokens are drawn and drafts judged."""

    KEYED = "keyed"
    RATIO = "ratio"


def acceptance(
    model: options.Model = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="NAME=DIR", help="A drafter to compare with; may be repeated."),
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", help="Only prompts of this domain; may be repeated.")
    ] = None,
    prompt_dir: Annotated[
        Path | None,
        typer.Option("--prompt-dir", metavar="DIR", help="Corpus or *.jsonl files; the package's prompts without it."),
    ] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", help="Prompts of each domain.")] = None,
    max_tokens: options.MaxTokens = 96,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help="May be repeated; 0 and 1 without it.")
    ] = None,
    sampler: Annotated[
        list[SamplerChoice] | None, typer.Option("--sampler", help="May be repeated; both without it.")
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    plot: options.Plot = None,
) -> None:
    """Accepted length, acceptance by draft position and calibration of the confidence, on held-out prompts."""
    settings = settings_for(temperature or [0.0, 1.0], [choice.value for choice in sampler or SamplerChoice])
    for setting in settings:
        options.sampling_params(setting.temperature, 1.0, 0, 0.0, seed, max_tokens, None)
    params = options.sampling_params(0.0, 1.0, 0, 0.0, seed, max_tokens, None)
    chosen = choose_prompts(prompt_dir, domain, prompts)
    named = [_split_name(words) for words in baseline or []]
    if plot is not None:
        check_plot(plot)
    measured = _open(model)
    items = [as_item(measured, prompt, model) for prompt in chosen]
    drafters = [_as_drafter("dspark" if model is None else model.name, measured)]
    drafters += [_open_baseline(name, folder, chosen, items) for name, folder in named]
    with progress() as display:
        task = display.add_task("prompts", total=len(items) * len(settings) * len(drafters))
        report = run_acceptance_bench(
            drafters,
            items,
            settings,
            params,
            model=model_name(model),
            device=device_of(measured),
            on_prompt=lambda: display.advance(task),
        )
    _publish(report, as_json, plot)
    if report.is_interrupted:
        raise typer.Exit(exit_codes.INTERRUPTED)


def _split_name(words: str) -> tuple[str, Path]:
    name, equals, folder = words.partition("=")
    if not (name and equals and folder):
        raise DSparkError(f"--baseline takes NAME=DIR, a name for the tables and a checkpoint's folder, not {words!r}")
    return name, Path(folder)


def _open(folder: Path | None) -> LLM:
    llm = open_llm(folder, DraftChoice.DSPARK, verifies_all=True)
    require_speculation(llm, "this benchmark")
    return llm


def _as_drafter(name: str, llm: LLM) -> Drafter:
    return Drafter(name, llm, llm.speculation.num_speculative_tokens)


def _open_baseline(name: str, folder: Path, prompts: Sequence[BenchPrompt], items: Sequence[Item]) -> Drafter:
    """A baseline reads the prompts as the measured model does, or the comparison would mean nothing."""
    llm = _open(folder)
    for prompt, item in zip(prompts, items, strict=True):
        if as_item(llm, prompt, folder) != item:
            raise DSparkError(
                f"the baseline {name} reads the prompt {item.name} as other tokens: it needs the same tokenizer"
            )
    return _as_drafter(name, llm)


def _publish(report: AcceptanceReport, as_json: bool, plot: Path | None) -> None:
    if plot is not None:
        write_whole(plot, plot_acceptance(report))
        note(f"wrote {plot}")
    if report.is_interrupted:
        note(f"interrupted after {len(report.runs)} runs")
    print_report(report.as_json() if as_json else None, acceptance_tables(report), acceptance_lines(report))
