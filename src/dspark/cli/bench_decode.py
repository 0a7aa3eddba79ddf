"""`dspark bench decode`: rounds and plain decoding at a model's real shapes, with random weights."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.decode import run_decode_bench, with_fitting_tables
from dspark.bench.decode_plot import plot_decode
from dspark.bench.decode_profile import StepProfile
from dspark.bench.decode_ranks import Collectives
from dspark.bench.decode_report import EXACT, FAST, DecodeFigure, DecodeReport, DecodeSettings
from dspark.bench.geometry import Geometry, read_geometry
from dspark.bench.numbers import whole_numbers
from dspark.cli import options
from dspark.cli.bench_inputs import check_outputs
from dspark.cli.console import note, print_report
from dspark.cli.files import write_whole
from dspark.cli.options import DraftChoice, EngramTablesChoice
from dspark.cli.roofline import publish_json
from dspark.config.errors import DSparkError
from dspark.engine.machine import processor

_ENGRAM_ROWS, _FIT = 2**20, "fit"
_MOST_DIGITS = 18  # Python itself refuses to read numbers of thousands
_ACCEPTED_LEN = 3.51


class AcceptanceChoice(StrEnum):
    """Who decides how many drafts are accepted."""

    FORCED = "forced"
    MEASURED = "measured"


def decode(
    geometry: options.Geometry,
    layers: options.Layers = None,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights in the real storage forms; the only ones yet.")
    ] = True,
    tp: Annotated[int, typer.Option("--tp", help="Devices that share every layer.")] = 1,
    requests: options.RequestCounts = "1,4,16",
    context: Annotated[
        str, typer.Option("--context", help="Tokens of each prompt, with commas between several lengths.")
    ] = "512",
    acceptance: Annotated[
        AcceptanceChoice | None,
        typer.Option("--acceptance", help="Accept by a forced length, as without it, or what the target accepts."),
    ] = None,
    accepted_len: Annotated[
        float | None,
        typer.Option(
            "--spec-decode-acceptance-length",
            help=f"Forced mean accepted length, the bonus counted; {_ACCEPTED_LEN} without it.",
        ),
    ] = None,
    exactness: Annotated[
        str, typer.Option("--exactness", metavar="exact|fast|exact,fast", help="Whose products; both are compared.")
    ] = EXACT,
    steps: Annotated[int, typer.Option("--steps", help="Timed steps of each figure.")] = 48,
    draft: options.Draft = DraftChoice.DSPARK,
    temperature: options.Temperature = 0.0,
    engram_rows: Annotated[
        str | None,
        typer.Option(
            "--engram-rows",
            metavar="N|fit",
            help="Rows of each Engram table at most, or as many as memory holds; look-ups stay as many. "
            f"{_ENGRAM_ROWS} without it.",
        ),
    ] = None,
    engram_tables: options.EngramTables = EngramTablesChoice.DEVICE,
    profile: Annotated[bool, typer.Option("--profile", help="Also list the kernels of a step.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Capture no graphs.")] = False,
    json_file: options.JsonFile = None,
    plot: options.Plot = None,
) -> None:
    """Time of rounds with forced acceptance beside plain decoding; the last line is one JSON object."""
    counts = whole_numbers("--requests", requests)
    contexts = whole_numbers("--context", context)
    options.require_positive(steps=steps, tp=tp)
    check_outputs(json_file, plot)
    chosen = read_geometry(geometry, layers, _row_limit(engram_rows))
    settings = DecodeSettings(
        requests=counts,
        contexts=contexts,
        steps=steps,
        accepted_len=_forced_len(draft, acceptance, accepted_len),
        with_draft=draft is DraftChoice.DSPARK,
        temperature=temperature,
        profile=profile,
        eager=eager,
        ranks=tp,
        exactness=_products(exactness),
        engram_tables=engram_tables.value,
    )
    if engram_rows == _FIT:
        chosen = with_fitting_tables(chosen, settings)
    _note_tables(chosen, engram_rows, engram_tables)
    for cut in chosen.cuts:
        note(f"cut: {cut}")
    report = run_decode_bench(chosen, settings, on_figure=_tell)
    if plot is not None:
        write_whole(plot, plot_decode(report))
        note(f"wrote {plot}")
    print_report(None, [_speed_table(report), _part_table(report), *_kernel_tables(report)], _lines(report))
    publish_json(report.as_json(), json_file)


def _forced_len(draft: DraftChoice, acceptance: AcceptanceChoice | None, accepted_len: float | None) -> float | None:
    """The forced length; None measures."""
    for flag, value in (("--acceptance", acceptance), ("--spec-decode-acceptance-length", accepted_len)):
        if draft is DraftChoice.OFF and value is not None:
            raise DSparkError(f"{flag} has no meaning with --draft off: leave one of them out")
    if acceptance is not AcceptanceChoice.MEASURED:
        return _ACCEPTED_LEN if accepted_len is None else accepted_len
    if accepted_len is not None:
        raise DSparkError("--acceptance measured and --spec-decode-acceptance-length contradict each other: drop one")
    return None


def _note_tables(geometry: Geometry, engram_rows: str | None, engram_tables: EngramTablesChoice) -> None:
    """Say which flags mean nothing for a model without Engram tables."""
    if geometry.plan.ngrams is not None:
        return
    if engram_rows is not None:
        note(f"note: --engram-rows has no effect: {geometry.name} has no Engram tables here")
    if engram_tables is not EngramTablesChoice.DEVICE:
        note(f"note: --engram-tables has no effect: {geometry.name} has no Engram tables here")


def _row_limit(text: str | None) -> int | None:
    """Rows of a table at most; None where memory decides."""
    if text is None:
        return _ENGRAM_ROWS
    if text == _FIT:
        return None
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise DSparkError(f'--engram-rows is {text!r}: give a number of rows, or "{_FIT}"')
    return int(text)


def _products(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= {EXACT, FAST} or len(set(names)) < len(names):
        raise DSparkError(f"--exactness is {text!r}: give {EXACT}, {FAST} or {EXACT},{FAST}")
    return names


def _tell(figure: DecodeFigure) -> None:
    """A figure as soon as it is there: a run that is cut short has told what it found."""
    parts = ", ".join(f"{name} {value:.2f}" for name, value in vars(figure.phases).items())
    note(f"{_title(figure)}: {figure.step_ms:.2f} ms a step ({parts})")


def _title(figure: DecodeFigure) -> str:
    return f"{figure.label}, {figure.num_requests} requests of {figure.context} tokens"


def _speed_table(report: DecodeReport) -> Table:
    table = Table(title="steps, ms", title_justify="left", box=SIMPLE_HEAD)
    headings = ("requests", "context", "median", "p10", "p90", "tokens", "ms/tok", "tok/s each", "tok/s", "gain")
    table.add_column("decoding")
    for heading in (*headings, "floor", "of floor"):
        table.add_column(heading, justify="right")
    for figure in report.figures:
        gain = report.gain(figure)
        table.add_row(
            figure.label,
            str(figure.num_requests),
            str(figure.context),
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
    for heading in (
        "requests",
        "context",
        "target",
        "draft",
        "sampling",
        "host",
        "all",
        "experts",
        "draft's",
        "floor of these",
    ):
        table.add_column(heading, justify="right")
    for figure in report.figures:
        phases = figure.phases
        parts = (phases.target, phases.draft, phases.sampling, phases.host, phases.total)
        table.add_row(
            figure.label,
            str(figure.num_requests),
            str(figure.context),
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
    busy = f"{found.launches:.0f} launches, busy {found.busy_ms:.2f} ms, idle {figure.idle_share or 0.0:.1%} of a step"
    busy += f" ({found.idle_share:.1%} under the profiler)"
    title = f"kernels of a step: {_title(figure)}: {busy}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("kernel")
    for heading in ("launches", "us", "us each"):
        table.add_column(heading, justify="right")
    for kernel in found.kernels:
        each = kernel.us / kernel.launches
        table.add_row(kernel.name, f"{kernel.launches:.1f}", f"{kernel.us:.1f}", f"{each:.1f}")
    return table


def _exchanged(figure: DecodeFigure, found: Collectives) -> str:
    """What ranks exchange in a step."""
    counts = f"{found.sums:g} sums and {found.gathers:g} exchanges of {found.num_bytes / 1e3:,.0f} kB a rank in a step"
    if found.ms is None:
        return counts
    return f"{counts}: {found.ms:.3f} ms by themselves, {found.ms / figure.step_ms:.1%} of it"


def _lines(report: DecodeReport) -> list[str]:
    machine, settings = report.machine, report.settings
    cuts = f" ({'; '.join(report.cuts)})" if report.cuts else ""
    lines = [
        f"{report.geometry}{cuts}, random weights, {processor(machine)}, torch {machine['torch']}",
        f"memory: {report.memory.sentence()}; {report.memory.num_possible:,} requests of this length would fit",
    ]
    if settings.engram_tables != "device":
        lines.append(f"Engram tables, if there are any, lie in the host's memory: {settings.engram_tables}")
    if settings.with_draft and settings.accepted_len is not None:
        lines.append(f"acceptance is forced to a mean length of {settings.accepted_len:g}: the text means nothing")
    if report.copy_bandwidth is not None:
        lines.append(f"floors are bytes over {report.copy_bandwidth / 1e12:.2f} TB/s, as a large copy moves them here")
    lines += [f"{_title(f)}: {f.profile}" for f in report.figures if isinstance(f.profile, str)]
    lines += [f"{_title(f)}: {_exchanged(f, f.collectives)}" for f in report.figures if f.collectives is not None]
    costs = [(figure, report.cost_of_exactness(figure)) for figure in report.figures]
    lines += [f"{_title(f)}: exactness costs {cost:+.1%} of a step" for f, cost in costs if cost is not None]
    if FAST in settings.exactness:
        lines.append("with fast products a row's bits may depend on the rows beside it: those figures are not exact")
    return lines
