"""The doctor's report as text: lines and tables."""

from rich.table import Table

from dspark.validate.doctor import DoctorReport, TensorAccount, Vocabulary
from dspark.validate.memory import StateBytes, WeightBytes

_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000


def format_bytes(num_bytes: float) -> str:
    """Three significant digits in decimal units: 1,234,567 bytes are "1.23 MB"."""
    size, unit = float(num_bytes), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.{0 if unit == 0 or size >= 100 else 1 if size >= 10 else 2}f} {_UNITS[unit]}"


def opening_lines(report: DoctorReport) -> list[str]:
    """The model, whether it would run, and its tensors."""
    return [
        f"{report.model}: {report.family}, {report.num_layers} layers, {report.num_draft_stages} draft stages",
        f"would run: {_outlook(report)}",
        f"speculation: {report.speculation}",
        _vocabulary_line(report.vocabulary),
        *_tensor_lines(report.tensors),
    ]


def _outlook(report: DoctorReport) -> str:
    """Yes or no, and what the machine lacks; why not is said by the refusals at the end."""
    if not report.is_healthy:
        return "no, see the errors below"
    return "yes" if report.memory_fault is None else f"not here: {report.memory_fault}"


def tables(report: DoctorReport) -> list[Table]:
    """Weights, state of a request, growing rows."""
    return [_weight_table(report.weights), _ring_table(report.state), _growing_table(report.state)]


def closing_lines(report: DoctorReport) -> list[str]:
    """What the tables add up to."""
    state, tokens = report.state, report.context_len
    lines = [
        f"one request: {format_bytes(state.request_bytes)} + {state.bytes_per_token:.0f} bytes a token, in pages of "
        f"{state.page_tokens} tokens ({format_bytes(state.page_bytes)})",
        f"state of {report.num_requests} requests of {tokens} tokens: {format_bytes(report.requests_bytes)}",
        f"weights unpacked to fp32, as the CPU engine holds them: {format_bytes(report.float32_bytes)}",
    ]
    if report.memory is not None:
        lines.append(f"here: {report.memory.sentence()}")
    if report.draft is not None:
        draft = report.draft
        lines.append(
            f"the draft adds: {format_bytes(draft.weight_bytes)} of weights ({draft.share_of_target:.1%} of the "
            f"target), and to each request {format_bytes(draft.window_bytes)} of windows and "
            f"{format_bytes(draft.slack_bytes)} of ring slack"
        )
    return lines


def _vocabulary_line(vocabulary: Vocabulary) -> str:
    tokens = "no tokenizer" if vocabulary.num_tokens is None else f"{vocabulary.num_tokens} tokens"
    padded = f", {vocabulary.num_padded} padded rows are never drawn" if vocabulary.num_padded else ""
    return f"vocabulary: {vocabulary.num_rows} rows, {tokens}{padded}"


def _tensor_lines(account: TensorAccount) -> list[str]:
    found = ""
    if account.num_found is not None and account.found_bytes is not None:
        found = f"{account.num_found} in the checkpoint ({format_bytes(account.found_bytes)}), "
    wanted = f"{account.num_expected} to load ({format_bytes(account.expected_bytes)})"
    lines = [f"tensors: {account.status}; {found}{wanted}"]
    lines += [
        f"  skipped: {item.num_tensors} ({format_bytes(item.num_bytes)}), {item.reason}" for item in account.skipped
    ]
    return lines + [f"  {remark}" for remark in account.remarks]


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _weight_table(rows: tuple[WeightBytes, ...]) -> Table:
    table = _table("weights as stored", "class", "dtype", "tensors", "size")
    for row in rows:
        table.add_row(row.memory_class, row.dtype, str(row.num_tensors), format_bytes(row.num_bytes))
    table.add_section()
    total = sum(row.num_bytes for row in rows)
    table.add_row("all", "", str(sum(row.num_tensors for row in rows)), format_bytes(total))
    return table


def _ring_table(state: StateBytes) -> Table:
    table = _table("state of a request, whatever its length", "rings", "number", "rows", "of these slack", "size")
    for ring in state.rings:
        size = format_bytes(ring.num_bytes)
        table.add_row(ring.name, str(ring.num_rings), str(ring.num_rows), str(ring.slack_rows), size)
    table.add_section()
    number = sum(ring.num_rings for ring in state.rings)
    table.add_row("all", str(number), "", "", format_bytes(state.request_bytes))
    return table


def _growing_table(state: StateBytes) -> Table:
    table = _table("rows that grow with a request", "rows", "stores", "tokens a row", "bytes a row", "bytes a token")
    for item in state.growing:
        table.add_row(
            item.name, str(item.num_stores), str(item.ratio), str(item.row_bytes), f"{item.bytes_per_token:.1f}"
        )
    table.add_section()
    table.add_row("all", "", "", "", f"{state.bytes_per_token:.1f}")
    return table
