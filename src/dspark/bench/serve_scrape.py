"""Counters of a server's Prometheus page, by the names that its dashboards read."""

import re
from collections.abc import Iterator

from dspark.bench.serve_metrics import Rounds

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_PREFIXES = ("dspark:", "vllm:")
_DRAFTS, _ACCEPTED = "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total"
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


def read_samples(page: str) -> Iterator[tuple[str, str, float]]:
    """(name without the engine's prefix, labels, value) of every sample; lines that are none are skipped."""
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        name = match["name"]
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        yield name, match["labels"] or "", value


def read_rounds(page: str | None) -> Rounds | None:
    """Speculative rounds since the server's start; None where the page has no such counters."""
    drafts, accepted, positions = 0.0, 0.0, dict[int, float]()
    is_known = False
    for name, labels, value in read_samples(page or ""):
        if name == _DRAFTS:
            is_known, drafts = True, drafts + value
        elif name == _ACCEPTED:
            accepted += value
        elif name == _PER_POSITION and (position := _POSITION.search(labels)):
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
    if not is_known:
        return None
    per_position = tuple(int(positions[number]) for number in sorted(positions))
    return Rounds(int(drafts), int(accepted), per_position)


def rounds_between(before: Rounds | None, after: Rounds | None) -> Rounds | None:
    """What was counted in between; None where either page had no counters."""
    if before is None or after is None:
        return None
    earlier = before.per_position or (0,) * len(after.per_position)
    per_position = tuple(late - early for late, early in zip(after.per_position, earlier, strict=False))
    return Rounds(after.num_rounds - before.num_rounds, after.num_accepted - before.num_accepted, per_position)
