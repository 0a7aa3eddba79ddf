"""The decode report as a picture; needs the optional package matplotlib."""

from itertools import product
from typing import Any

from dspark.bench.decode_report import EXACT, PLAIN, ROUNDS, DecodeFigure, DecodeReport
from dspark.bench.plot import as_png, new_figure

_COLORS = {PLAIN: "#9aa0a6", ROUNDS: "#1a73e8"}
_PHASES = (("target", "#1a73e8"), ("draft", "#f9ab00"), ("sampling", "#34a853"), ("host", "#9aa0a6"))


def plot_decode(report: DecodeReport) -> bytes:
    """Draw tokens a second by requests, and where the time of each step goes beside its floor.

    Returns:
        A PNG file's bytes.
    Raises:
        DSparkError: matplotlib is not installed.
    """
    figure = new_figure(12.0, 4.4)
    speed, parts = figure.subplots(1, 2)
    _draw_speed(speed, report)
    _draw_parts(parts, report)
    figure.suptitle(", ".join([report.geometry, *report.cuts]))
    return as_png(figure)


def _draw_speed(axes: Any, report: DecodeReport) -> None:
    for mode, color in _COLORS.items():
        for context, exactness in product(report.settings.contexts, report.settings.exactness):
            wanted = (mode, context, exactness)
            figures = [f for f in report.figures if (f.mode, f.context, f.exactness) == wanted]
            if figures:
                places = [str(figure.num_requests) for figure in figures]
                values = [figure.tokens_per_second for figure in figures]
                style = "-" if exactness == EXACT else ":"
                alpha = 1.0 - 0.7 * report.settings.contexts.index(context) / len(report.settings.contexts)
                label = f"{figures[0].label}, {context} tokens"
                axes.plot(places, values, style, marker="o", color=color, alpha=alpha, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests")
    axes.set_ylabel("tokens/s, all requests")
    axes.set_title("speed")
    axes.legend(fontsize=8)


def _draw_parts(axes: Any, report: DecodeReport) -> None:
    names = [_name(figure) for figure in report.figures]
    below = [0.0] * len(names)
    for phase, color in _PHASES:
        values = [max(getattr(figure.phases, phase), 0.0) for figure in report.figures]
        axes.bar(names, values, 0.6, bottom=below, label=phase, color=color)
        below = [low + value for low, value in zip(below, values, strict=True)]
    floors = [(name, f.floor_ms) for name, f in zip(names, report.figures, strict=True) if f.floor_ms is not None]
    if floors:
        axes.plot(*zip(*floors, strict=True), linestyle="none", marker="_", markersize=28, color="black", label="floor")
    axes.set_ylabel("ms a step")
    axes.set_title("where a step's time goes")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=8)


def _name(figure: DecodeFigure) -> str:
    return f"{figure.label}\n{figure.num_requests} x {figure.context}"
