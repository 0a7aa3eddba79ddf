"""The serving report as a picture; needs the optional package matplotlib."""

from typing import Any

from dspark.bench.plot import as_png, new_figure
from dspark.bench.serve import ServeReport
from dspark.bench.serve_metrics import Latency

_COLORS = ("#9aa0a6", "#1a73e8")
_STYLES = (("p50", "-", "o"), ("p90", "--", "s"), ("p99", ":", "^"))
_PANELS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"))


def plot_serve(report: ServeReport) -> bytes:
    """Draw throughput and latency percentiles by level.

    Returns:
        A PNG file's bytes.

    Raises:
        DSparkError: matplotlib is not installed.
    """
    figure = new_figure(15.0, 4.2)
    throughput, *latencies = figure.subplots(1, 4)
    _draw_throughput(throughput, report)
    for axes, (label, name) in zip(latencies, _PANELS, strict=True):
        _draw_latency(axes, report, label, name)
    figure.suptitle(", ".join(dict.fromkeys(report.models)))
    return as_png(figure)


def _draw_throughput(axes: Any, report: ServeReport) -> None:
    for number, target in enumerate(report.targets):
        rates = [level.sides[number].output_throughput for level in report.levels]
        axes.plot(range(len(rates)), rates, marker="o", label=target.name, color=_color(report, number))
    axes.set_title("output throughput")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    _name_levels(axes, report)
    axes.legend(fontsize=8)


def _draw_latency(axes: Any, report: ServeReport, label: str, name: str) -> None:
    for number, target in enumerate(report.targets):
        latencies: list[Latency | None] = [getattr(level.sides[number], name) for level in report.levels]
        for percentile, style, marker in _STYLES:
            values = [float("nan") if one is None else getattr(one, percentile) for one in latencies]
            legend = f"{target.name} {percentile}" if len(report.targets) > 1 else percentile
            color = _color(report, number)
            axes.plot(range(len(values)), values, style, marker=marker, markersize=4, color=color, label=legend)
    axes.set_title(label)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    _name_levels(axes, report)
    axes.legend(fontsize=7)


def _color(report: ServeReport, number: int) -> str:
    return _COLORS[number] if len(report.targets) > 1 else _COLORS[-1]


def _name_levels(axes: Any, report: ServeReport) -> None:
    names = [level.load.name for level in report.levels]
    axes.set_xticks(range(len(names)), names, fontsize=8)
