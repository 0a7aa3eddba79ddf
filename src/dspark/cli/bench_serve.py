"""`dspark bench serve`: load on a server, one setting alone or two against each other."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dspark.bench.load import ClosedLoop, Load, OpenLoop
from dspark.bench.prompts import DOMAINS, BenchPrompt, load_prompts
from dspark.bench.serve import ServeReport, ServeSettings, Target, num_expected, run_serve_bench
from dspark.bench.serve_client import require_httpx
from dspark.bench.serve_plot import plot_serve
from dspark.bench.serve_process import ServerProcess
from dspark.bench.serve_requests import LengthRange, RequestSettings, mixed_domains, read_prompt_file
from dspark.bench.serve_table import serve_lines, serve_tables
from dspark.cli import exit_codes, options
from dspark.cli.bench_inputs import check_outputs
from dspark.cli.console import fail, note, print_report, progress
from dspark.cli.files import read_text, write_whole
from dspark.config.errors import DSparkError


class EndpointChoice(StrEnum):
    """Where prompts are sent."""

    AUTO = "auto"
    COMPLETIONS = "completions"
    CHAT = "chat"


def serve(
    model: options.Model = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", help="A running server; twice compares two. Without it the command starts its own."),
    ] = None,
    server_args: Annotated[
        list[str] | None,
        typer.Option("--server-args", metavar="ARGS", help="Arguments of `dspark serve`; twice compares two settings."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="ARGS", help="Compare with a second server that has these arguments too."),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="N[,N...]", help="Requests in flight; 1 without it.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="R[,R...]", help="Poisson arrivals a second, whatever is in flight.")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", help="Measured requests at each level.")] = 32,
    warmup: Annotated[
        int | None, typer.Option("--warmup", help="Requests before them, not measured; as many as are in flight.")
    ] = None,
    block: Annotated[
        int | None, typer.Option("--block", help="Requests of a turn in a comparison; twice those in flight.")
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", help=f"One of {', '.join(DOMAINS)}; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="JSON Lines with prompt, messages or turns.")
    ] = None,
    input_len: Annotated[
        str | None, typer.Option("--input-len", metavar="N[:M]", help="Prompts of N (to M) random tokens instead.")
    ] = None,
    output_len: Annotated[
        str | None, typer.Option("--output-len", metavar="N[:M]", help="Generate exactly N (to M) tokens.")
    ] = None,
    endpoint: Annotated[
        EndpointChoice, typer.Option("--endpoint", help="auto sends dialogues to chat, texts to completions.")
    ] = EndpointChoice.AUTO,
    max_tokens: options.MaxTokens = 96,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    served_model: Annotated[
        str | None, typer.Option("--served-model", help="Name in the requests; the server's first without it.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Sent as a bearer token.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one request.")] = 300.0,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON; - is stdout alone.")
    ] = None,
    plot: options.Plot = None,
) -> None:
    """Latency and throughput of a server under load; fails when two settings answer with different tokens."""
    check_outputs(as_json, plot)
    require_httpx()
    loads = _loads(concurrency, rate, seed)
    settings = ServeSettings(requests, warmup, block, timeout, api_key)
    shared = RequestSettings(
        max_tokens=options.sampling_params(temperature, 1.0, 0, 0.0, seed, max_tokens, None).max_tokens,
        output_len=None if output_len is None else LengthRange.parse(output_len, "--output-len"),
        input_len=None if input_len is None else LengthRange.parse(input_len, "--input-len"),
        temperature=temperature,
        seed=seed,
        endpoint=endpoint.value,
    )
    prompts = _prompts(domain, prompt_file)
    arguments = _argument_lists(server_args or [], compare)
    with _targets(model, url or [], arguments, served_model) as targets, progress() as display:
        task = display.add_task("requests", total=num_expected(loads, len(targets), settings))
        report = run_serve_bench(
            targets, loads, prompts, settings, shared, on_result=lambda record: display.advance(task)
        )
    _publish(report, as_json, plot)


def _loads(concurrency: str | None, rate: str | None, seed: int) -> list[Load]:
    loads: list[Load] = [ClosedLoop(int(number)) for number in _numbers(concurrency, "--concurrency", int)]
    loads += [OpenLoop(number, seed) for number in _numbers(rate, "--rate", float)]
    return loads or [ClosedLoop(1)]


def _numbers(words: str | None, name: str, kind: type[int] | type[float]) -> Iterator[float]:
    for word in words.split(",") if words is not None else ():
        try:
            yield kind(word)
        except ValueError as error:
            raise DSparkError(f"{name} takes numbers separated by commas, not {words!r}") from error


def _argument_lists(server_args: Sequence[str], compare: str | None) -> list[str]:
    """Arguments of one or two servers."""
    first = server_args[0] if server_args else ""
    second = [f"{first} {compare}".strip()] if compare is not None else []
    lists = [first, *server_args[1:], *second]
    if len(lists) > 2:
        raise DSparkError("two settings can be compared, not more: give --server-args twice, or once with --compare")
    return lists


def _prompts(domain: Sequence[str] | None, file: Path | None) -> list[BenchPrompt]:
    if file is None:
        return mixed_domains(load_prompts(domain or DOMAINS))
    if domain:
        raise DSparkError("--domain chooses among the package's prompts: leave it out with --prompt-file")
    return read_prompt_file(read_text(file), file.name)


@contextmanager
def _targets(
    model: Path | None, urls: Sequence[str], arguments: Sequence[str], served_model: str | None
) -> Iterator[list[Target]]:
    """The servers to measure; those that this command starts are stopped at the end."""
    if urls:
        if model is not None or any(arguments) or len(arguments) > 1:
            raise DSparkError("--url measures a server that runs already: leave out --model, --server-args, --compare")
        if len(urls) > 2:
            raise DSparkError(f"two servers can be compared, not {len(urls)}")
        yield [Target(name, address, served_model) for name, address in zip(_unique(urls), urls, strict=True)]
        return
    with ExitStack() as stack:
        targets = []
        for name, words in zip(_unique([words or "default" for words in arguments]), arguments, strict=True):
            split = tuple(shlex.split(words))
            own = () if model is None else ("--model", str(model))
            note(f"starting dspark serve {words}".rstrip())
            server = stack.enter_context(ServerProcess([*own, *split]))
            targets.append(Target(name, server.url, served_model, split))
        yield targets


def _unique(names: Sequence[str]) -> list[str]:
    """Names that differ: the second of two equal ones says so."""
    if len(names) == 2 and names[0] == names[1]:
        return [names[0], f"{names[1]} (again)"]
    return list(names)


def _publish(report: ServeReport, as_json: Path | None, plot: Path | None) -> None:
    if plot is not None:
        write_whole(plot, plot_serve(report))
        note(f"wrote {plot}")
    is_stdout = as_json is not None and str(as_json) == "-"
    if as_json is not None and not is_stdout:
        write_whole(as_json, (json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n").encode())
        note(f"wrote {as_json}")
    if report.is_interrupted:
        note("interrupted: the figures are those of the requests that were finished")
    print_report(report.as_json() if is_stdout else None, serve_tables(report), serve_lines(report))
    if report.is_interrupted:
        raise typer.Exit(exit_codes.INTERRUPTED)
    if report.num_different:
        fail(f"{report.num_different} answers differ between the two settings, and they must not")
        raise typer.Exit(exit_codes.FAILED)
    if not any(side.num_requests for level in report.levels for side in level.sides):
        fail("no request succeeded")
        raise typer.Exit(exit_codes.FAILED)
