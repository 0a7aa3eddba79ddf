"""The acceptance report as a picture; needs the optional package matplotlib."""

from typing import Any

import numpy as np

from dspark.bench.acceptance import AcceptanceReport, Run
from dspark.bench.calibration import reliability_bins
from dspark.bench.plot import as_png, new_figure
from dspark.bench.rounds import survival_pairs

_COLORS = ("#1a73e8", "#9aa0a6", "#e8710a", "#188038", "#a142f4")


def plot_acceptance(report: AcceptanceReport) -> bytes:
    """Draw accepted length by domain and acceptance by position, both of the first setting, and reliability.

    Returns:
        A PNG file's bytes.

    Raises:
        DSparkError: matplotlib is not installed.
    """
    figure = new_figure(13.0, 4.2)
    lengths, positions, reliability = figure.subplots(1, 3)
    first = [run for run in report.runs if run.setting == report.runs[0].setting]
    _draw_lengths(lengths, first)
    _draw_positions(positions, first)
    _draw_reliability(reliability, [run for run in report.runs if run.drafter == first[0].drafter])
    return as_png(figure)


def _draw_lengths(axes: Any, runs: list[Run]) -> None:
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        means = [row.accepted_len or 0.0 for row in run.rows]
        intervals = [row.accepted_len_interval or (mean, mean) for row, mean in zip(run.rows, means, strict=True)]
        errors = [
            [max(mean - low, 0.0) for mean, (low, _) in zip(means, intervals, strict=True)],
            [max(high - mean, 0.0) for mean, (_, high) in zip(means, intervals, strict=True)],
        ]
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(means))]
        axes.bar(places, means, width, yerr=errors, capsize=2, label=run.drafter, color=_COLORS[number % len(_COLORS)])
    axes.set_xticks(range(len(runs[0].rows)), [row.name for row in runs[0].rows])
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_ylabel("tokens per round, 95 % interval")
    axes.set_title(f"accepted length, {runs[0].setting.name}")
    axes.legend(fontsize=8)


def _draw_positions(axes: Any, runs: list[Run]) -> None:
    for number, run in enumerate(runs):
        color, statistics = _COLORS[number % len(_COLORS)], run.rows[-1].statistics
        positions = list(range(1, run.block_size + 1))
        for rate, style, label in (
            (statistics.unconditional, "-", "1..k accepted"),
            (statistics.conditional, ":", "after the prefix"),
        ):
            shares = [float("nan") if (value := rate(k).value) is None else value for k in positions]
            axes.plot(positions, shares, style, marker="o", markersize=4, color=color, label=f"{run.drafter}, {label}")
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position k")
    axes.set_ylabel("share of rounds")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"acceptance by position, {runs[0].setting.name}, all domains")
    axes.legend(fontsize=7)


def _draw_reliability(axes: Any, runs: list[Run]) -> None:
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
    for number, run in enumerate(runs):
        rounds = [one for prompt in run.prompts for one in prompt.rounds if one.confidence]
        pairs = [survival_pairs(rounds, k) for k in range(1, run.block_size + 1)]
        bins = reliability_bins(*np.concatenate(pairs).T)
        sizes = [5 + 60 * part.count / max(other.count for other in bins) for part in bins]
        color = _COLORS[number % len(_COLORS)]
        predicted, observed = [part.predicted for part in bins], [part.observed for part in bins]
        axes.plot(predicted, observed, color=color, linewidth=1, label=run.setting.name)
        axes.scatter(predicted, observed, sizes, color=color)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("predicted survival a_k")
    axes.set_ylabel("share that survived")
    axes.set_title(f"reliability of {runs[0].drafter}, all positions")
    axes.legend(fontsize=8)
