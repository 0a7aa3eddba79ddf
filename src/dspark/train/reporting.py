"""What a run says: a progress bar on a terminal, plain lines elsewhere, and one JSON object a line in a log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PROGRESS_SCALE = 1000


class JsonlLog:
    """Appends events to a file; every line is whole when the call returns.

    Args:
        path: created with its folder; an existing log is continued. None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **values: Any) -> None:
        """Append {"event": event, ...values}; floats keep six significant digits."""
        if self._path is None:
            return
        record = {"event": event} | {key: _short(value) for key, value in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return value


class RunDisplay:
    """Shows a run: a bar where the console is a terminal, otherwise a line every few seconds.

    Args:
        title: short name of what is trained.
        console: where.
        line_every_s: distance of the plain lines.
        now: monotonic seconds.
    """

    def __init__(
        self,
        title: str,
        console: Console | None = None,
        line_every_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._line_every_s = line_every_s
        self._now = now
        self._last_line = float("-inf")
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> RunDisplay:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TimeElapsedColumn(),
                TextColumn("{task.fields[line]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=PROGRESS_SCALE, line="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: float, step: int, loss: float, tokens_per_s: float, eta_s: float | None) -> None:
        """Show where the run is."""
        eta = "-" if eta_s is None else f"{int(eta_s) // 60}:{int(eta_s) % 60:02d}"
        line = f"step {step}  loss {loss:.4f}  {tokens_per_s:,.0f} tok/s  ETA {eta}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress * PROGRESS_SCALE, line=line)
        elif self._now() - self._last_line >= self._line_every_s:
            self._last_line = self._now()
            self._console.print(f"{self._title} {progress:6.1%}  {line}", highlight=False)

    def say(self, text: str) -> None:
        """Print a line beside the bar."""
        (self._bar.console if self._bar is not None else self._console).print(text, highlight=False)


class IntervalMeter:
    """Sums of an interval, kept on the device so that no step waits for its figures."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.last: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0
        self.steps = 0
        self.tokens = 0
        self.restart()

    def restart(self) -> None:
        """Leave the time since the last step out of the rate, and the steps before it."""
        self._began = self._now()
        self.tokens = 0

    def add(self, figures: Mapping[str, torch.Tensor]) -> None:
        for name, value in figures.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._count += 1

    def take(self) -> tuple[dict[str, float], float]:
        """Return the means and the tokens a second of the interval, and begin another."""
        means = {name: float(value) / self._count for name, value in self._sums.items()}
        rate = self.tokens / max(1e-9, self._now() - self._began)
        self._clear()
        return {**means, **self.last}, rate
