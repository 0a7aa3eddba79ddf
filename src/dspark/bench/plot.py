"""Benchmark reports as pictures; needs the optional package matplotlib."""

import io
from typing import Any

from dspark.bench.generate import GenerateReport
from dspark.config.errors import DSparkError

_PLAIN, _DSPARK = "#9aa0a6", "#1a73e8"


def require_matplotlib() -> None:
    """Refuse early, before a benchmark runs for minutes.

    Raises:
        DSparkError: matplotlib is not installed.
    """
    new_figure(1.0, 1.0)


def plot_generate(report: GenerateReport) -> bytes:
    """Draw speed, accepted length and acceptance by draft position.

    Returns:
        A PNG file's bytes.

    Raises:
        DSparkError: matplotlib is not installed.
    """
    figure = new_figure(13.0, 4.2)
    speed, accepted, positions = figure.subplots(1, 3)
    _draw_speed(speed, report)
    _draw_accepted_len(accepted, report)
    _draw_positions(positions, report)
    figure.suptitle(f"{report.model}: DSpark {report.total.ratio:.2f} x plain, tokens identical")
    return as_png(figure)


def as_png(figure: Any) -> bytes:
    """A figure as the bytes of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, inches; raises DSparkError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DSparkError("a plot needs matplotlib: install it with pip install 'dspark[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _draw_speed(axes: Any, report: GenerateReport) -> None:
    rows = [*report.domains, report.total]
    places = range(len(rows))
    axes.bar([x - 0.2 for x in places], [row.plain_tokens_per_second for row in rows], 0.4, label="plain", color=_PLAIN)
    bars = axes.bar(
        [x + 0.2 for x in places], [row.dspark_tokens_per_second for row in rows], 0.4, label="DSpark", color=_DSPARK
    )
    axes.bar_label(bars, [f"{row.ratio:.2f}x" for row in rows], fontsize=8)
    axes.set_xticks(list(places), [row.name for row in rows])
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.15)
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title("speed")


def _draw_accepted_len(axes: Any, report: GenerateReport) -> None:
    rows = [*report.domains, report.total]
    means = [row.accepted_len for row in rows]
    below = [row.accepted_len - row.accepted_len_interval[0] for row in rows]
    above = [row.accepted_len_interval[1] - row.accepted_len for row in rows]
    bars = axes.bar(range(len(rows)), means, 0.6, yerr=[below, above], capsize=3, color=_DSPARK)
    axes.bar_label(bars, [f"{mean:.2f}" for mean in means], fontsize=8, label_type="center", color="white")
    axes.axhline(1.0, color=_PLAIN, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylabel("tokens per round, 95 % interval")
    axes.set_title("accepted length")


def _draw_positions(axes: Any, report: GenerateReport) -> None:
    for row in [*report.domains, report.total]:
        style = {"color": "black", "linewidth": 2} if row is report.total else {"linewidth": 1}
        positions = range(1, len(row.acceptance) + 1)
        shares = [float("nan") if share is None else share for share in row.acceptance]
        axes.plot(list(positions), shares, marker="o", markersize=4, label=row.name, **style)
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position k")
    axes.set_ylabel("accepted, given that 1..k-1 were")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8)
    axes.set_title("acceptance by position")
