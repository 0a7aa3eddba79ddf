"""The serving report as a picture; needs the optional package matplotlib."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from dspark.bench.plot import as_png, new_figure
from dspark.bench.serve import Level, ServeReport
from dspark.bench.serve_metrics import Figures

_COLORS = ("#9aa0a6", "#1a73e8")
_STYLES = (("p50", "-", "o"), ("p90", "--", "s"), ("p99", ":", "^"))
_PANELS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"))


def plot_serve(report: ServeReport) -> bytes:
    """Draw throughput and latency percentiles by level; levels of one kind of load are joined.

    Returns:
        A PNG file's bytes.

    Raises:
        DSparkError: matplotlib is not installed.
    """
    figure = new_figure(15.0, 4.2)
    throughput, *latencies = figure.subplots(1, 1 + len(_PANELS))
    _draw_throughput(throughput, report)
    for axes, (label, name) in zip(latencies, _PANELS, strict=True):
        _draw_latency(axes, report, label, name)
    throughput.legend(fontsize=8)
    latencies[0].legend(fontsize=7)
    figure.suptitle(", ".join(dict.fromkeys(report.models)))
    return as_png(figure)


def _draw_throughput(axes: Any, report: ServeReport) -> None:
    for number, target in enumerate(report.targets):
        _draw(axes, report, number, target.name, lambda figures: figures.output_throughput)
    _finish(axes, report, "output throughput", "tokens/s")


def _draw_latency(axes: Any, report: ServeReport, label: str, name: str) -> None:
    for number, target in enumerate(report.targets):
        for percentile, style, marker in _STYLES:
            legend = f"{target.name} {percentile}" if len(report.targets) > 1 else percentile
            _draw(axes, report, number, legend, _span_of(name, percentile), linestyle=style, marker=marker)
    _finish(axes, report, label, "ms")


def _span_of(name: str, percentile: str) -> Callable[[Figures], float]:
    def value(figures: Figures) -> float:
        latency = getattr(figures, name)
        return float("nan") if latency is None else float(getattr(latency, percentile))

    return value


def _draw(
    axes: Any, report: ServeReport, side: int, label: str, value: Callable[[Figures], float], **style: Any
) -> None:
    color = _COLORS[side] if len(report.targets) > 1 else _COLORS[-1]
    for levels in _by_kind(report):
        values = [value(level.sides[side]) for _, level in levels]
        axes.plot(
            [place for place, _ in levels],
            values,
            **{"marker": "o", "markersize": 4, "color": color, **style},
            label=label,
        )
        label = "_"  # one entry in the legend for all kinds of load


def _by_kind(report: ServeReport) -> Iterator[list[tuple[int, Level]]]:
    """Runs of levels of one kind of load, with their places on the axis."""
    for _, levels in groupby(enumerate(report.levels), key=lambda pair: type(pair[1].load)):
        yield list(levels)


def _finish(axes: Any, report: ServeReport, title: str, unit: str) -> None:
    names = [level.load.name for level in report.levels]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_ylabel(unit)
