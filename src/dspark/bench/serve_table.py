"""The serving report as text tables."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.bench.serve import Level, ServeReport
from dspark.bench.serve_compare import Comparison, Ratio
from dspark.bench.serve_metrics import CHUNKS, Figures, Latency

_LATENCIES = (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))


def serve_tables(report: ServeReport) -> list[Table]:
    """Throughput, latencies, and with two sides their ratios."""
    tables = [_throughput_table(report), _latency_table(report)]
    compared = [(level, level.comparison) for level in report.levels if level.comparison is not None]
    return [*tables, _ratio_table(report, compared)] if compared else tables


def serve_lines(report: ServeReport) -> list[str]:
    """What the tables do not say: failures, the comparison of tokens, the machine."""
    settings, machine = report.settings, report.machine
    lines = [f"failed: {_errors(report)}"] if report.num_failed else []
    lines += [_tokens_line(report)] if len(report.targets) == 2 else []
    if any(side.itl_basis == CHUNKS for level in report.levels for side in level.sides):
        lines.append("ITL: gaps between chunks, because the server does not say how many tokens a chunk holds")
    lines.append(
        f"{settings['num_requests']} requests at each level, temperature {settings['temperature']:g}, "
        f"model {', '.join(dict.fromkeys(report.models))}; the client ran on {machine['cpu']}, "
        f"{machine['cpu_cores']} cores"
    )
    return lines


def _errors(report: ServeReport) -> str:
    parts = []
    for level in report.levels:
        for target, figures in zip(report.targets, level.sides, strict=True):
            kinds = ", ".join(f"{count} {kind}" for kind, count in figures.errors.items())
            parts += [f"{target.name} {level.load.name}: {kinds}"] if kinds else []
    return "; ".join(parts)


def _tokens_line(report: ServeReport) -> str:
    compared = [level.comparison for level in report.levels if level.comparison is not None]
    pairs, different = sum(c.num_pairs for c in compared), sum(c.num_different for c in compared)
    how = " and ".join(dict.fromkeys(comparison.compared_by for comparison in compared))
    if not different:
        return f"outputs of both sides ({how}): all {pairs} identical"
    names = ", ".join(name for comparison in compared for name in comparison.differences)
    return f"outputs of both sides ({how}): {different} of {pairs} DIFFER ({names})"


def _throughput_table(report: ServeReport) -> Table:
    table = _table("throughput", ("load", "side"))
    for heading in ("done", "failed", "warm-up", "seconds", "req/s", "out tok/s", "all tok/s", "in flight", "accepted"):
        table.add_column(heading, justify="right")
    for level in report.levels:
        for target, figures in zip(report.targets, level.sides, strict=True):
            table.add_row(level.load.name, target.name, *_throughput_cells(figures))
    return table


def _throughput_cells(figures: Figures) -> list[str]:
    accepted = "-" if figures.accepted_len is None else f"{figures.accepted_len:.2f}"
    return [
        str(figures.num_requests),
        str(figures.num_failed),
        str(figures.num_warmup),
        f"{figures.duration_s:.1f}",
        f"{figures.request_throughput:.2f}",
        f"{figures.output_throughput:.1f}",
        f"{figures.total_throughput:.1f}",
        f"{figures.mean_concurrency:.1f}",
        accepted,
    ]


def _latency_table(report: ServeReport) -> Table:
    table = _table("latency, ms", ("load", "side", "span"))
    for heading in ("mean", "p50", "p90", "p99", "values"):
        table.add_column(heading, justify="right")
    for level in report.levels:
        for target, figures in zip(report.targets, level.sides, strict=True):
            for label, name in _LATENCIES:
                table.add_row(level.load.name, target.name, label, *_latency_cells(getattr(figures, name)))
    return table


def _latency_cells(latency: Latency | None) -> list[str]:
    if latency is None:
        return ["-"] * 5
    values = (latency.mean, latency.p50, latency.p90, latency.p99)
    return [*(f"{value:.1f}" for value in values), str(latency.count)]


def _ratio_table(report: ServeReport, compared: list[tuple[Level, Comparison]]) -> Table:
    first, second = (target.name for target in report.targets)
    table = _table(f"{second} over {first}, 95 % intervals", ("load",))
    for heading in ("pairs", "out tok/s", "TTFT", "TPOT", "E2E"):
        table.add_column(heading, justify="right")
    for level, comparison in compared:
        ratios = (comparison.output_throughput, comparison.ttft, comparison.tpot, comparison.e2e)
        table.add_row(level.load.name, str(comparison.num_pairs), *map(_ratio_cell, ratios))
    return table


def _ratio_cell(ratio: Ratio) -> str:
    if ratio.value is None:
        return "-"
    interval = "" if ratio.interval is None else f" [{ratio.interval[0]:.2f}, {ratio.interval[1]:.2f}]"
    return f"{ratio.value:.2f}{interval}"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading)
    return table
