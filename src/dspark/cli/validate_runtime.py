"""`dspark validate runtime`: passes as they are launched, at other places and in other company, bit for bit."""

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.cli import exit_codes, options
from dspark.cli.console import fail, note, print_report
from dspark.cli.files import require_writable, write_whole
from dspark.cli.session import model_name, require_folder
from dspark.config.errors import DSparkError
from dspark.engine.machine import processor
from dspark.validate.lifecycle.probe import ProbeResult
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint
from dspark.validate.runtime.run import RuntimeReport, RuntimeSettings, validate_runtime

_DEFAULTS = RuntimeSettings(with_graphs=True)


def runtime(
    graph: Annotated[
        bool,
        typer.Option("--graph", help="Passes of fixed shape, captured where the device can; ragged ones without it."),
    ] = False,
    model: options.Model = None,
    parts: Annotated[int, typer.Option("--parts", help="Requests whose rows are compared.")] = _DEFAULTS.num_parts,
    requests: Annotated[
        int | None,
        typer.Option("--requests", help=f"With --graph: requests whose tokens are compared, {_DEFAULTS.num_requests}."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help=f"With --graph: tokens of each of them, {_DEFAULTS.num_tokens}.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = _DEFAULTS.seed,
    tiny: Annotated[bool, typer.Option("--tiny/--no-tiny", help="Also check two tiny random models.")] = True,
    tensor_parallel_size: options.TensorParallelSize = 1,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE.json", help="Write the report here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check that no launch is bound to a request, a slot, a page or memory that is not its own; exits 1 if one is.

    Requests are played alone, then at other places, in other company, padded, beside stores full of values that are no
    numbers: every row must keep its bits. With --graph, whole requests are also compared in tokens with decoding op by
    op. Ranks cannot divide the embedded model, so with several of them and no --model only the tiny ones are checked.
    """
    options.rank_settings(tensor_parallel_size)
    options.require_positive(parts=parts, requests=requests, tokens=tokens)
    for name, value in (("--requests", requests), ("--tokens", tokens)):
        if value is not None and not graph:
            raise DSparkError(
                f"{name} is of whole requests, which are compared with --graph only: add it or drop {name}"
            )
    if output is not None:
        require_writable("--output", output)
    require_folder(model)
    settings = RuntimeSettings(
        graph,
        parts,
        requests or _DEFAULTS.num_requests,
        tokens or _DEFAULTS.num_tokens,
        seed,
        tensor_parallel_size,
    )
    is_given = model is not None or tensor_parallel_size == 1
    if not (tiny or is_given):
        raise DSparkError("ranks cannot divide the embedded model: give another one by --model, or drop --no-tiny")
    logging.getLogger("dspark.engine").setLevel(logging.ERROR)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        models: list[tuple[str, Path | None]] = [
            (name, write_tiny_checkpoint(Path(folder) / name, name, ranks=tensor_parallel_size))
            for name in (TINY_NAMES if tiny else ())
        ]
        if is_given:
            models.append((model_name(model), model))
        report = validate_runtime(models, settings, on_probe=_tell)
    report.seconds = time.perf_counter() - began
    if output is not None:
        write_whole(output, (json.dumps(report.as_json(), indent=2) + "\n").encode())
    print_report(report.as_json() if as_json else None, [_table(report)], _lines(report))
    if not report.is_ok:
        fail("a launch depends on more than its rows: see the lines above")
        raise typer.Exit(exit_codes.FAILED)


def _tell(probe: ProbeResult) -> None:
    note(f"{probe.name}: {probe.message}")


def _table(report: RuntimeReport) -> Table:
    table = Table(title=f"runtime: {report.launches}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("check")
    table.add_column("compared", justify="right")
    table.add_column("verdict")
    for probe in report.probes:
        verdict = "ok" if probe.is_ok else "FAILED"
        style = None if probe.is_ok else "red"
        table.add_row(probe.name, str(probe.num_compared), f"{verdict}: {probe.message}", style=style)
    return table


def _lines(report: RuntimeReport) -> list[str]:
    machine = report.machine
    verdict = "no mismatch" if report.is_ok else "FAILED"
    return [f"{verdict}; {processor(machine)}, torch {machine['torch']}, {report.seconds:.0f} s"]
