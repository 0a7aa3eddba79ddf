"""`dspark roofline`: the least time of a pass, and what rounds can gain, from a model's plan alone."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.geometry import Geometry, read_geometry
from dspark.bench.numbers import whole_numbers
from dspark.bench.planned_exchanges import exchanges_json
from dspark.bench.roofline import (
    BANDWIDTH,
    PEAK_FLOPS,
    PassCost,
    Roofline,
    RooflineRow,
    as_json,
    compute_bound_rows,
    roofline_rows,
)
from dspark.cli import options
from dspark.cli.console import note, print_report
from dspark.cli.files import write_whole
from dspark.config import Config
from dspark.config.admission import refuse_parallel_split
from dspark.config.checks import require_number
from dspark.config.errors import DSparkError
from dspark.config.question import Question
from dspark.models.facts import model_facts

SCHEMA = "dspark.roofline/1"


def roofline(
    geometry: options.Geometry,
    tp: Annotated[int, typer.Option("--tp", help="Devices that share every layer.")] = 1,
    requests: options.RequestCounts = "1,4,16,64",
    context: Annotated[int, typer.Option("--context", help="Tokens of each request.")] = 8192,
    accepted_len: Annotated[
        float, typer.Option("--accepted-len", help="Mean accepted length of a round, the bonus counted.")
    ] = 3.0,
    layers: options.Layers = None,
    bandwidth_tb_s: Annotated[
        float, typer.Option("--bandwidth-tb-s", help="What a large copy moves on one device, TB/s.")
    ] = BANDWIDTH / 1e12,
    peak_tflops: Annotated[
        float, typer.Option("--peak-tflops", help="What bf16 products reach on one device.")
    ] = PEAK_FLOPS / 1e12,
    json_file: options.JsonFile = None,
) -> None:
    """Bytes that passes must move, their least times, and the gain of rounds over plain decoding."""
    counts = whole_numbers("--requests", requests)
    chosen = read_geometry(geometry, layers)
    _check(chosen, tp, context, accepted_len, bandwidth_tb_s, peak_tflops)
    model = Roofline(chosen.plan, tp)
    rows = roofline_rows(model, counts, context, accepted_len)
    bandwidth = bandwidth_tb_s * 1e12
    bound = compute_bound_rows(model, context, bandwidth, peak_tflops * 1e12)
    exchanges = [exchanges_json(model, row) for row in rows] if tp > 1 else []
    lines = [_place(chosen, tp, context, accepted_len, bound), *map(_exchanged, exchanges)]
    print_report(None, [_floors(rows, bandwidth), _bytes(rows[0])], lines)
    report = {
        "schema": SCHEMA,
        "geometry": chosen.name,
        "cuts": list(chosen.cuts),
        "tp": tp,
        "context": context,
        "accepted_len": accepted_len,
        "bandwidth_tb_s": bandwidth_tb_s,
        "compute_bound_rows": bound,
        "rows": as_json(rows, bandwidth),
        "exchanges": exchanges,
    }
    publish_json(report, json_file)


def publish_json(report: dict[str, Any], json_file: Path | None) -> None:
    """Print a report for programs as the last line, and write it to a file where one is named."""
    line = json.dumps(report)
    if json_file is not None:
        write_whole(json_file, (line + "\n").encode())
        note(f"wrote {json_file}")
    typer.echo(line)


def _check(geometry: Geometry, tp: int, context: int, accepted_len: float, bandwidth: float, peak: float) -> None:
    """Refuse numbers that mean nothing."""
    options.require_positive(tp=tp)
    question = Question(Config(tensor_parallel_size=tp), model_facts(geometry.plan), None, None, None)
    for sentence in refuse_parallel_split(question):
        raise DSparkError(sentence)
    if not 1 <= context <= geometry.plan.max_positions:
        raise DSparkError(f"--context is {context}: {geometry.name} has positions 1 to {geometry.plan.max_positions}")
    block = geometry.plan.draft.block_size if geometry.plan.draft else 0
    if not 1 <= accepted_len <= 1 + block:
        raise DSparkError(f"--accepted-len is {accepted_len:g}: rounds of {geometry.name} emit 1 to {1 + block} tokens")
    for flag, value in (("--bandwidth-tb-s", bandwidth), ("--peak-tflops", peak)):
        require_number(flag, value, above=0)


def _floors(rows: list[RooflineRow], bandwidth: float) -> Table:
    table = Table(title="least times, ms", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("requests", "plain", "experts", "rows", "target", "experts", "draft", "round", "ideal gain"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [str(row.num_requests), f"{row.plain.ms(bandwidth):.2f}", f"{row.plain.experts:.0f}"]
        if row.draft is not None:
            cells += [
                str(row.num_rows),
                f"{row.target.ms(bandwidth):.2f}",
                f"{row.target.experts:.0f}",
                f"{row.draft.ms(bandwidth):.2f}",
                f"{row.round_ms(bandwidth):.2f}",
                f"{row.gain:.2f}x",
            ]
        table.add_row(*cells)
    return table


def _bytes(row: RooflineRow) -> Table:
    """Where the bytes of the smallest number of requests go."""
    passes: list[tuple[str, PassCost]] = [("plain", row.plain)]
    if row.draft is not None:
        passes += [("target", row.target), ("draft", row.draft)]
    title = f"MB of one device, {row.num_requests} request{'s' * (row.num_requests > 1)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("what")
    for name, _ in passes:
        table.add_column(name, justify="right")
    kinds = dict.fromkeys(kind for _, cost in passes for kind, size in cost.parts.items() if size)
    for kind in kinds:
        table.add_row(str(kind), *(f"{cost.parts.get(kind, 0) / 1e6:,.1f}" for _, cost in passes))
    table.add_section()
    table.add_row("all", *(f"{cost.num_bytes / 1e6:,.1f}" for _, cost in passes))
    return table


def _exchanged(found: dict[str, Any]) -> str:
    """What ranks send each other beside the bytes that they read."""
    parts = (
        f"{name} sums {one['sums']} times and gathers {one['gathers']}, {one['num_bytes'] / 1e6:,.2f} MB"
        for name, one in (("a plain pass", found["plain"]), ("a round", found["round"]))
    )
    return f"{found['requests']} request{'s' * (found['requests'] > 1)}, each device: {', '.join(parts)}"


def _place(geometry: Geometry, tp: int, context: int, accepted_len: float, bound: int | None) -> str:
    cuts = f" ({'; '.join(geometry.cuts)})" if geometry.cuts else ""
    devices = f"{tp} device{'s' * (tp > 1)}"
    limit = "" if bound is None else f"; products take longer than weights from {bound:,} rows on"
    return f"{geometry.name}{cuts}, {devices}, {context} tokens a request, accepted length {accepted_len:g}{limit}"
