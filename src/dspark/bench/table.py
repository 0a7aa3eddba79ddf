"""Benchmark reports as text tables."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.generate import GenerateReport, Row
from dspark.engine.machine import processor

_SPEED_HEADINGS = ("prompts", "tokens", "plain tok/s", "DSpark tok/s", "ratio", "accepted length", "wasted rows")


def generate_tables(report: GenerateReport) -> list[Table]:
    """Speed and acceptance by domain, then acceptance by draft position."""
    return [_speed_table(report), _position_table(report)]


def generate_lines(report: GenerateReport) -> list[str]:
    """What the tables do not say: memory, the comparison of tokens, the machine."""
    peaks = ", ".join(f"{mode} {size / 2**20:.0f} MiB" for mode, size in report.peak_bytes.items())
    exactness = "" if report.is_peak_exact else " (of the whole process: this system cannot reset its mark)"
    return [
        f"peak memory with both engines loaded: {peaks}{exactness}",
        _comparison(report),
        f"{report.total.num_prompts} prompts, {report.settings['repeats']} runs of each mode, {report.model}",
        _place(report.machine),
    ]


def _place(machine: dict[str, Any]) -> str:
    return f"{processor(machine)}, {machine['torch_threads']} threads, torch {machine['torch']}"


def _comparison(report: GenerateReport) -> str:
    if report.is_identical:
        return f"tokens of both compared: all {report.total.num_tokens} identical"
    wrong = [m for m in report.measurements if m.first_difference is not None]
    places = ", ".join(f"{m.item.name} at token {m.first_difference}" for m in wrong[:5])
    return f"tokens of both compared: {len(wrong)} of {report.total.num_prompts} prompts DIFFER ({places})"


def _speed_table(report: GenerateReport) -> Table:
    table = Table(title="plain against DSpark", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("domain")
    for heading in _SPEED_HEADINGS:
        table.add_column(heading, justify="right")
    for row in report.domains:
        table.add_row(*_speed_cells(row))
    table.add_section()
    table.add_row(*_speed_cells(report.total))
    return table


def _speed_cells(row: Row) -> list[str]:
    low, high = row.accepted_len_interval
    return [
        row.name,
        str(row.num_prompts),
        str(row.num_tokens),
        f"{row.plain_tokens_per_second:.1f}",
        f"{row.dspark_tokens_per_second:.1f}",
        f"{row.ratio:.2f}x",
        f"{row.accepted_len:.2f} [{low:.2f}, {high:.2f}]",
        f"{row.wasted_rows:.0%}",
    ]


def _position_table(report: GenerateReport) -> Table:
    table = Table(title="drafts accepted at position k, given that 1..k-1 were", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("domain")
    for position in range(1, len(report.total.acceptance) + 1):
        table.add_column(f"k={position}", justify="right")
    for row in [*report.domains, report.total]:
        table.add_row(row.name, *("-" if share is None else f"{share:.0%}" for share in row.acceptance))
    return table
