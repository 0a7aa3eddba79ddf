"""The soak report as text tables."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.soak_mix import DROPPED, LEFT, OK
from dspark.bench.soak_report import SoakReport
from dspark.bench.soak_watch import Sample

_MIB = 2**20


def soak_tables(report: SoakReport) -> list[Table]:
    """Outcomes by kind of request, and what the server held."""
    return [_outcome_table(report), _holding_table(report)]


def soak_lines(report: SoakReport) -> list[str]:
    """The comparison, the memory, and the verdict."""
    log, memory = report.log, report.memory
    lines = [
        f"{report.num_requests} requests in {log.load_s:.0f} s ({report.num_requests / max(log.load_s, 1e-9):.1f} a "
        f"second), {log.num_prompt_tokens} prompt tokens ({log.num_cached_tokens} cached), "
        f"{log.num_tokens} tokens in whole answers, the slowest request took {log.slowest_s:.1f} s",
        _comparison(report),
    ]
    if memory is not None:
        low, high = (value / _MIB for value in memory.interval)
        lines.append(
            f"memory of the server: {memory.start / _MIB:.0f} MiB, {memory.growth / _MIB:+.1f} MiB "
            f"[{low:+.1f}, {high:+.1f}] in the last {memory.stretch_s:.0f} s"
        )
    if report.violations:
        return [*lines, *(f"VIOLATION: {violation}" for violation in report.violations)]
    return [*lines, "nothing is left over, and nothing was wrong"]


def _comparison(report: SoakReport) -> str:
    wrong = sum(bool(verdict.difference) for verdict in report.verdicts)
    tokens = sum(verdict.num_tokens for verdict in report.verdicts)
    return f"{len(report.verdicts)} answers ({tokens} tokens) decoded again, alone and plainly: {wrong} differ"


def _outcome_table(report: SoakReport) -> Table:
    table = Table(title="requests by outcome", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("kind")
    results = sorted({result for _, result in report.log.results}, key=lambda name: (name not in (OK, LEFT), name))
    for result in results:
        table.add_column("gone" if result == LEFT else "cut" if result == DROPPED else result, justify="right")
    for kind in sorted({kind for kind, _ in report.log.results}):
        cells = (report.log.results.get((kind, result), 0) for result in results)
        table.add_row(kind, *(str(number) if number else "-" for number in cells))
    return table


def _holding_table(report: SoakReport) -> Table:
    table = Table(title="what the server held", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for heading in ("before", "most under load", "at rest"):
        table.add_column(heading, justify="right")
    for name, cells in _holdings(report):
        table.add_row(name, *cells)
    return table


def _holdings(report: SoakReport) -> Iterator[tuple[str, list[str]]]:
    log = report.log
    for label, name, unit in (
        ("memory, MiB", "rss_bytes", _MIB),
        ("open files", "num_files", 1),
        ("threads", "num_threads", 1),
        ("running", "num_running", 1),
        ("waiting", "num_waiting", 1),
        ("pages held by requests", "num_held_pages", 1),
        ("pages of the cache alone", "num_cached_pages", 1),
        ("cached prefixes", "num_images", 1),
        ("preemptions", "num_preemptions", 1),
    ):
        under_load = [value for sample in log.samples if (value := getattr(sample, name)) is not None]
        most = max(under_load, default=None)
        yield label, [_cell(_of(log.before, name), unit), _cell(most, unit), _cell(_of(log.at_rest, name), unit)]


def _of(sample: Sample | None, name: str) -> int | None:
    return None if sample is None else getattr(sample, name)


def _cell(value: int | None, unit: int) -> str:
    return "-" if value is None else str(round(value / unit))
