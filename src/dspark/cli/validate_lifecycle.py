"""`dspark validate lifecycle`: engines under schedules that nobody would choose, against each request alone."""

import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dspark.cli import exit_codes, options
from dspark.cli.console import err, fail, note, print_report
from dspark.cli.files import require_writable, write_whole
from dspark.cli.session import model_name, require_folder
from dspark.config.errors import DSparkError
from dspark.validate.lifecycle.ragged_probe import probe_ragged
from dspark.validate.lifecycle.report import lines, tables
from dspark.validate.lifecycle.run import Budget, Run
from dspark.validate.lifecycle.run import Progress as OnProgress
from dspark.validate.lifecycle.sampling_probe import probe_keyed, probe_ratio
from dspark.validate.lifecycle.scenarios.registry import SCENARIOS
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint

DEFAULT_EPISODES = 32
# Context, longest output and longest random prompt: the model that was asked for may be slow.
_GIVEN_SIZES = (512, 16, 150)
_TINY_SIZES = (512, 40)


def lifecycle(
    model: options.Model = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Play random episodes for so long.", show_default=False)
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option("--episodes", help=f"Play so many random episodes; {DEFAULT_EPISODES} by default."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of everything random.")] = 0,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="Play this one only, and no episodes; may be repeated.")
    ] = None,
    no_scenarios: Annotated[
        bool, typer.Option("--no-scenarios", help="Play episodes only: for the second and later parts of a long run.")
    ] = False,
    episode: Annotated[int | None, typer.Option("--episode", help="Play this random episode again.")] = None,
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", metavar="N,N,...", help="With --episode: only these of its requests.")
    ] = None,
    sampling_probe: Annotated[
        bool, typer.Option("--sampling-probe", help="Also check samplers over seeds, temperatures and filters.")
    ] = False,
    ragged_probe: Annotated[
        bool, typer.Option("--ragged-probe", help="Also compare rows in shared passes with rows alone.")
    ] = False,
    tensor_parallel_size: options.TensorParallelSize = 1,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE.json", help="Write the report here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Compare every request of a busy engine with the same request decoded alone, bit for bit; exits 1 on a mismatch.

    Named scenarios run on the model and on two tiny random ones; then random episodes, most of them on the tiny ones.
    """
    if scenario and no_scenarios:
        raise DSparkError("--scenario and --no-scenarios contradict each other: give one of them")
    options.rank_settings(tensor_parallel_size)
    if output is not None:
        require_writable("--output", output)
    names = _scenario_names(scenario)
    budget = _budget(seconds, episodes)
    wanted = _arrival_numbers(arrivals, episode)
    began = time.perf_counter()
    # Drafting is made to stop and start again here all the time; a user's engine logs that, this one need not.
    logging.getLogger("dspark.engine").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, _display() as on_progress:
        run = _open(model, Path(folder), seed, tensor_parallel_size, on_progress)
        if episode is not None:
            run.replay(episode, wanted)
        else:
            run.scenarios([] if no_scenarios else names)
            if sampling_probe:
                for subject in (run.tiny[0], run.given):
                    run.report.probes += probe_keyed(subject)
                run.report.probes += probe_ratio()
            if ragged_probe:
                for subject in (*run.tiny, run.given):
                    run.report.probes += probe_ragged(subject)
            if not scenario:
                run.episodes(budget)
    report = run.report
    report.seconds = time.perf_counter() - began
    if output is not None:
        write_whole(output, (json.dumps(report.as_json(), indent=2) + "\n").encode())
    print_report(report.as_json() if as_json else None, tables(report), lines(report))
    if not report.is_ok:
        fail("the validator found something: see the lines above")
        raise typer.Exit(exit_codes.FAILED)


def _open(model: Path | None, folder: Path, seed: int, ranks: int, on_progress: OnProgress) -> Run:
    """Load the model and write the tiny ones. Ranks cannot divide the embedded one: a tiny one stands in for it."""
    require_folder(model)
    max_len, max_output, max_prompt = _GIVEN_SIZES
    tiny = [
        Subject(name, write_tiny_checkpoint(folder / name, name, ranks=ranks), *_TINY_SIZES, ranks)
        for name in TINY_NAMES
    ]
    flag = () if model is None else ("--model", str(model))
    name = model_name(model)
    if ranks > 1:
        flag = (*flag, "--tensor-parallel-size", str(ranks))
    if ranks > 1 and model is None:
        name = f"{TINY_NAMES[0]} of seed 1"
        model = write_tiny_checkpoint(folder / "given", TINY_NAMES[0], seed=1, ranks=ranks)
    given = Subject(name, model, max_len, max_output, ranks)
    return Run(given, tiny, seed, max_prompt, flag, on_progress)


def _scenario_names(wanted: list[str] | None) -> list[str]:
    unknown = [name for name in wanted or () if name not in SCENARIOS]
    if unknown:
        raise DSparkError(f"{unknown[0]!r} is no scenario; known are {', '.join(SCENARIOS)}")
    return wanted or list(SCENARIOS)


def _budget(seconds: float | None, episodes: int | None) -> Budget:
    if seconds is not None and episodes is not None:
        raise DSparkError("--seconds and --episodes both say how long to run: give one of them")
    for name, value in (("--seconds", seconds), ("--episodes", episodes)):
        if value is not None and not value >= 0:
            raise DSparkError(f"{name} is {value}: give 0 or more")
    return Budget(None, seconds) if seconds is not None else Budget(DEFAULT_EPISODES if episodes is None else episodes)


def _arrival_numbers(text: str | None, episode: int | None) -> list[int] | None:
    if text is None:
        return None
    if episode is None:
        raise DSparkError("--arrivals chooses requests of one episode: give --episode as well")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise DSparkError(f"--arrivals is {text!r}: give numbers with commas between them")
    return numbers


@contextmanager
def _display() -> Iterator[OnProgress]:
    """What runs, on stderr: one line that changes on a terminal, and a line a minute elsewhere."""
    if not err.is_terminal:
        yield _Minutes().say
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as display:
        task = display.add_task("loading")
        yield lambda what, steps: display.update(task, description=f"{what}, {steps} random steps so far")


class _Minutes:
    """Says what runs once a minute: a log should show that a long run is alive, and not much more."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 60.0

    def say(self, what: str, steps: int) -> None:
        """Note it, or nothing if that was done a short while ago."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 60.0
            note(f"{what}, {steps} random steps so far")
