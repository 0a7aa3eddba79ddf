"""The acceptance report as text tables."""

from collections.abc import Callable
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.acceptance import AcceptanceReport, Gain, Run
from dspark.bench.bootstrap import Interval
from dspark.bench.rounds import ConfidenceQuality
from dspark.engine.machine import processor
from dspark.speculative.statistics import Estimate

_ROW_HEADINGS = ("domain", "drafter")
_QUALITY_HEADINGS = ("drafts", "ECE of c_k", "AUC of c_k", "ECE of a_k")


def acceptance_tables(report: AcceptanceReport) -> list[Table]:
    """Acceptance for each setting, gains over baselines, and the confidence of the measured drafter."""
    tables: list[Table] = []
    for setting, group in groupby(report.runs, lambda run: run.setting):
        runs = list(group)
        tables += [_length_table(setting.name, runs), _conditional_table(setting.name, runs)]
    if report.gains:
        tables.append(_gain_table(report.gains))
    judged = [run for run in report.runs if run.drafter == report.runs[0].drafter and run.rows[-1].quality]
    if judged:
        tables += [_confidence_table(judged), _position_table(judged)]
    return tables


def acceptance_lines(report: AcceptanceReport) -> list[str]:
    """What the tables do not say."""
    machine, settings = report.machine, report.settings
    lines = [
        f"{settings['prompts']} prompts, rounds that begin in the first {settings['max_tokens']} tokens, "
        f"seed {settings['seed']}, {report.model}",
        f"{processor(machine)}, torch {machine['torch']}",
    ]
    different = sum(
        gain.num_different for gain in report.gains if gain.setting.sampler == "keyed" and gain.domain != "all"
    )
    if report.gains:
        lines.insert(1, f"prompts whose tokens depend on the drafter, ratio sampler aside: {different}")
    return lines


def _length_table(setting: str, runs: list[Run]) -> Table:
    table = _new_table(f"{setting}: accepted length, and % of rounds that accepted drafts 1..k", *_ROW_HEADINGS)
    for heading in ("rounds", "length", "95 %", *_positions(runs)):
        table.add_column(heading, justify="right")
    for place in range(len(runs[0].rows)):
        for run in runs:
            row = run.rows[place]
            length = "-" if row.accepted_len is None else f"{row.accepted_len:.2f}"
            shares = _shares(run, row.statistics.unconditional)
            table.add_row(
                row.name, run.drafter, str(row.statistics.rounds), length, _interval(row.accepted_len_interval), *shares
            )
        table.add_section()
    return table


def _conditional_table(setting: str, runs: list[Run]) -> Table:
    table = _new_table(f"{setting}: % of drafts k accepted, given that 1..k-1 were", *_ROW_HEADINGS)
    for heading in _positions(runs):
        table.add_column(heading, justify="right")
    for place in range(len(runs[0].rows)):
        for run in runs:
            row = run.rows[place]
            table.add_row(row.name, run.drafter, *_shares(run, row.statistics.conditional))
        table.add_section()
    return table


def _positions(runs: list[Run]) -> list[str]:
    """Headings of the draft positions; a drafter with a shorter block leaves the last ones empty."""
    return [f"k={k}" for k in range(1, max(run.block_size for run in runs) + 1)]


def _shares(run: Run, rate: Callable[[int], Estimate]) -> list[str]:
    return [_percent(rate(k)) for k in range(1, run.block_size + 1)]


def _gain_table(gains: tuple[Gain, ...]) -> Table:
    """One column for each baseline and setting."""
    table = _new_table("accepted length over the baseline's on the same prompts, with 95 % interval", "domain")
    columns = list(dict.fromkeys((gain.baseline, gain.setting) for gain in gains))
    for baseline, setting in columns:
        table.add_column(f"{baseline}, {setting.name}", justify="right")
    cells = {(gain.domain, gain.baseline, gain.setting): _gain_cell(gain) for gain in gains}
    for domain in dict.fromkeys(gain.domain for gain in gains):
        table.add_row(domain, *(cells[domain, baseline, setting] for baseline, setting in columns))
    return table


def _gain_cell(gain: Gain) -> str:
    return "-" if gain.ratio is None else f"{gain.ratio:.2f} {_interval(gain.interval)}"


def _confidence_table(runs: list[Run]) -> Table:
    table = _new_table(f"confidence of {runs[0].drafter}, all positions", "setting", "domain")
    for heading in _QUALITY_HEADINGS:
        table.add_column(heading, justify="right")
    for run in runs:
        for row in run.rows:
            table.add_row(run.setting.name, row.name, *_confidence_cells(row.quality[-1]))
        table.add_section()
    return table


def _position_table(runs: list[Run]) -> Table:
    table = _new_table(f"confidence of {runs[0].drafter} by draft position, all domains", "setting", "k")
    for heading in _QUALITY_HEADINGS:
        table.add_column(heading, justify="right")
    for run in runs:
        for k, quality in enumerate(run.rows[-1].quality[:-1], start=1):
            table.add_row(run.setting.name, str(k), *_confidence_cells(quality))
        table.add_section()
    return table


def _confidence_cells(quality: ConfidenceQuality) -> list[str]:
    auc = "-" if quality.auc is None else f"{quality.auc:.3f}"
    return [str(quality.num_confidence), _error(quality.confidence_ece), auc, _error(quality.survival_ece)]


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _percent(estimate: Estimate) -> str:
    return "-" if estimate.value is None else f"{100 * estimate.value:.0f}"


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
