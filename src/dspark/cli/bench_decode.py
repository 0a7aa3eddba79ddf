"""`dspark bench decode`: rounds and plain decoding at a model's real shapes, with random weights."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.decode import DecodeFigure, DecodeReport, DecodeSettings, run_decode_bench
from dspark.bench.decode_plot import plot_decode
from dspark.bench.decode_profile import StepProfile
from dspark.bench.geometry import read_geometry
from dspark.bench.numbers import whole_numbers
from dspark.cli import options
from dspark.cli.bench_inputs import check_outputs
from dspark.cli.console import note, print_report
from dspark.cli.files import write_whole
from dspark.cli.options import DraftChoice
from dspark.cli.roofline import publish_json
from dspark.config.errors import DSparkError

_ENGRAM_ROWS = 2**20


def decode(
    geometry: options.Geometry,
    layers: options.Layers = None,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights in the real storage forms; the only ones yet.")
    ] = True,
    tp: Annotated[int, typer.Option("--tp", help="Devices that share every layer.")] = 1,
    requests: options.RequestCounts = "1,4,16",
    context: Annotated[int, typer.Option("--context", help="Tokens of each prompt.")] = 512,
    accepted_len: Annotated[
        float,
        typer.Option("--spec-decode-acceptance-length", help="Forced mean accepted length, the bonus counted."),
    ] = 3.51,
    steps: Annotated[int, typer.Option("--steps", help="Timed steps of each figure.")] = 48,
    draft: options.Draft = DraftChoice.DSPARK,
    temperature: options.Temperature = 0.0,
    engram_rows: Annotated[
        int, typer.Option("--engram-rows", help="Rows of each Engram table at most; look-ups stay as many.")
    ] = _ENGRAM_ROWS,
    profile: Annotated[bool, typer.Option("--profile", help="Also list the kernels of a step.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Capture no graphs.")] = False,
    json_file: options.JsonFile = None,
    plot: options.Plot = None,
) -> None:
    """Time of rounds with forced acceptance beside plain decoding; the last line is one JSON object."""
    counts = whole_numbers("--requests", requests)
    for name, value in (("--context", context), ("--steps", steps), ("--tp", tp), ("--engram-rows", engram_rows)):
        if value < 1:
            raise DSparkError(f"{name} is {value}: give at least 1")
    check_outputs(json_file, plot)
    chosen = read_geometry(geometry, layers, engram_rows)
    for cut in chosen.cuts:
        note(f"cut: {cut}")
    settings = DecodeSettings(
        requests=counts,
        context=context,
        steps=steps,
        accepted_len=accepted_len,
        with_draft=draft is DraftChoice.DSPARK,
        temperature=temperature,
        profile=profile,
        eager=eager,
        ranks=tp,
    )
    report = run_decode_bench(chosen, settings, on_figure=_tell)
    if plot is not None:
        write_whole(plot, plot_decode(report))
        note(f"wrote {plot}")
    print_report(None, [_speed_table(report), _part_table(report), *_kernel_tables(report)], _lines(report))
    publish_json(report.as_json(), json_file)


def _tell(figure: DecodeFigure) -> None:
    """A figure as soon as it is there: a run that is cut short has told what it found."""
    parts = ", ".join(f"{name} {value:.2f}" for name, value in vars(figure.phases).items())
    note(f"{figure.mode}, {figure.num_requests} requests: {figure.step_ms:.2f} ms a step ({parts})")


def _speed_table(report: DecodeReport) -> Table:
    table = Table(title="steps, ms", title_justify="left", box=SIMPLE_HEAD)
    headings = ("requests", "median", "10th", "90th", "tokens", "ms/token", "tok/s/request", "tok/s", "gain", "floor")
    table.add_column("decoding")
    for heading in (*headings, "of floor"):
        table.add_column(heading, justify="right")
    for figure in report.figures:
        gain = report.gain(figure)
        table.add_row(
            figure.mode,
            str(figure.num_requests),
            f"{figure.step_ms:.2f}",
            f"{figure.low_ms:.2f}",
            f"{figure.high_ms:.2f}",
            f"{figure.tokens:.2f}",
            f"{figure.ms_per_token:.2f}",
            f"{figure.tokens_per_second / figure.num_requests:.1f}",
            f"{figure.tokens_per_second:.1f}",
            "-" if gain is None else f"{gain:.2f}x",
            "-" if figure.floor_ms is None else f"{figure.floor_ms:.2f}",
            "-" if figure.floor_ms is None else f"{figure.floor_ms / figure.step_ms:.0%}",
        )
    return table


def _part_table(report: DecodeReport) -> Table:
    table = Table(title="where the time goes, ms", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("decoding")
    for heading in ("requests", "target", "draft", "sampling", "host", "all", "experts", "draft's", "floor of these"):
        table.add_column(heading, justify="right")
    for figure in report.figures:
        phases = figure.phases
        parts = (phases.target, phases.draft, phases.sampling, phases.host, phases.total)
        table.add_row(
            figure.mode,
            str(figure.num_requests),
            *(f"{value:.2f}" for value in parts),
            *("-" if count is None else f"{count:.1f}" for count in figure.experts),
            "-" if figure.counted_floor_ms is None else f"{figure.counted_floor_ms:.2f}",
        )
    return table


def _kernel_tables(report: DecodeReport) -> list[Table]:
    return [
        _kernel_table(figure, figure.profile) for figure in report.figures if isinstance(figure.profile, StepProfile)
    ]


def _kernel_table(figure: DecodeFigure, found: StepProfile) -> Table:
    busy = f"{found.launches:.0f} launches, busy {found.busy_ms:.2f} of {found.wall_ms:.2f} ms"
    title = f"kernels of a step: {figure.mode}, {figure.num_requests} requests: {busy}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("kernel")
    for heading in ("launches", "us", "us each"):
        table.add_column(heading, justify="right")
    for kernel in found.kernels:
        each = kernel.us / kernel.launches
        table.add_row(kernel.name, f"{kernel.launches:.1f}", f"{kernel.us:.1f}", f"{each:.1f}")
    return table


def _lines(report: DecodeReport) -> list[str]:
    machine, settings = report.machine, report.settings
    cuts = f" ({'; '.join(report.cuts)})" if report.cuts else ""
    device = machine.get("gpu", machine["cpu"])
    lines = [
        f"{report.geometry}{cuts}, random weights, prompts of {settings.context} tokens, {device}, "
        f"torch {machine['torch']}",
        f"memory: {report.memory.sentence()}; {report.memory.num_possible:,} requests of this length would fit",
    ]
    if settings.with_draft and settings.accepted_len is not None:
        lines.append(f"acceptance is forced to a mean length of {settings.accepted_len:g}: the text means nothing")
    if report.copy_bandwidth is not None:
        lines.append(f"floors are bytes over {report.copy_bandwidth / 1e12:.2f} TB/s, as a large copy moves them here")
    lines += [f"{f.mode}, {f.num_requests} requests: {f.profile}" for f in report.figures if isinstance(f.profile, str)]
    return lines
