"""`dspark bench soak`: a server under everything that clients do, for a long time, and nothing of it may be left."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dspark.bench.serve import Target
from dspark.bench.serve_client import require_httpx
from dspark.bench.serve_process import ServerProcess
from dspark.bench.soak import SoakSettings, run_soak
from dspark.bench.soak_oracle import Oracle
from dspark.bench.soak_plot import plot_soak
from dspark.bench.soak_report import SoakReport
from dspark.bench.soak_table import soak_lines, soak_tables
from dspark.cli import exit_codes, options
from dspark.cli.bench_inputs import check_outputs
from dspark.cli.console import fail, note, print_report, progress
from dspark.cli.files import write_whole

# A pool in which requests take each other's pages, and limits that the load goes beyond.
MAX_BODY_BYTES = 256 * 1024
SERVER_ARGS = (
    f"--max-num-seqs 16 --max-model-len 512 --max-num-pages 18 --max-waiting 40 --max-body-bytes {MAX_BODY_BYTES} "
    "--log-level warning"
)


def soak(
    model: options.Model = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A running server of this package; without it the command starts one.")
    ] = None,
    server_args: Annotated[
        str, typer.Option("--server-args", metavar="ARGS", help="Arguments of `dspark serve`.")
    ] = SERVER_ARGS,
    minutes: Annotated[float, typer.Option("--minutes", help="Length of the load.")] = 5.0,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Clients with a request in flight.")] = 24,
    burst: Annotated[int, typer.Option("--burst", help="Further requests at one moment, now and then.")] = 32,
    burst_every: Annotated[float, typer.Option("--burst-every", help="Seconds between bursts.")] = 20.0,
    checks: Annotated[int, typer.Option("--checks", help="Answers that are decoded again alone, about.")] = 150,
    no_structured: Annotated[bool, typer.Option("--no-structured", help="Ask for no structured output.")] = False,
    max_body_bytes: Annotated[
        int | None, typer.Option("--max-body-bytes", help="Longest body that the server at --url takes.")
    ] = None,
    seed: options.Seed = 0,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Sent as a bearer token.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds after which a request hangs.")] = 300.0,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the record as JSON; - is stdout alone.")
    ] = None,
    plot: options.Plot = None,
) -> None:
    """Load a server to its limit with all that goes wrong; fails when something leaks, hangs or answers wrongly."""
    check_outputs(as_json, plot)
    require_httpx()
    is_default = url is None and server_args == SERVER_ARGS
    settings = SoakSettings(
        seconds=60 * minutes,
        concurrency=concurrency,
        burst=burst,
        burst_every_s=burst_every,
        seed=seed,
        num_checked=checks,
        timeout_s=timeout,
        max_body_bytes=MAX_BODY_BYTES if is_default else max_body_bytes,
        has_structured=not no_structured,
        api_key=api_key,
    )
    with _server(model, url, server_args) as (target, server), progress() as display:
        task = display.add_task("seconds", total=round(settings.seconds))
        report = run_soak(
            target,
            settings,
            lambda max_model_len: Oracle(model, max_model_len),
            server=server,
            on_second=lambda at, text: display.update(task, completed=round(at), description=text),
        )
    _publish(report, as_json, plot)


@contextmanager
def _server(model: Path | None, url: str | None, words: str) -> Iterator[tuple[Target, ServerProcess | None]]:
    """The server to load; one that this command starts is stopped at the end, and must end in order."""
    if url is not None:
        yield Target("server", url), None
        return
    arguments = shlex.split(words)
    note(f"starting dspark serve {words}")
    server = ServerProcess([*(() if model is None else ("--model", str(model))), *arguments])
    with server:
        yield Target("server", server.url, arguments=tuple(arguments)), server
    if (code := server.stop()) != 0:
        fail(f"the server ended with code {code}; it printed:\n{server.output}")
        raise typer.Exit(exit_codes.FAILED)


def _publish(report: SoakReport, as_json: Path | None, plot: Path | None) -> None:
    if plot is not None:
        write_whole(plot, plot_soak(report))
        note(f"wrote {plot}")
    is_stdout = as_json is not None and str(as_json) == "-"
    if as_json is not None and not is_stdout:
        write_whole(as_json, (json.dumps(report.as_json(), ensure_ascii=False) + "\n").encode())
        note(f"wrote {as_json}")
    print_report(report.as_json() if is_stdout else None, soak_tables(report), soak_lines(report))
    if report.violations:
        raise typer.Exit(exit_codes.FAILED)
    if report.is_interrupted:
        raise typer.Exit(exit_codes.INTERRUPTED)
