"""Two sides under the same load and the same requests: ratios with intervals, and whether their tokens agree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.bench.bootstrap import Counts, Interval, ratio_interval
from dspark.bench.serve_client import RequestRecord
from dspark.bench.serve_metrics import duration_s, e2e_ms, tpot_ms, ttft_ms

Blocks = Sequence[Sequence[RequestRecord]]
_NAMED_DIFFERENCES = 5


@dataclass(frozen=True)
class Ratio:
    """The second side's mean over the first's, and its 95 % interval; None with too little to compare."""

    value: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Second side over first.

    Attributes:
        num_pairs: requests that succeeded on both sides.
        ttft, tpot, e2e: ratios of mean latencies, requests resampled in pairs; below 1 the second side is faster.
        output_throughput: ratio of tokens a second, blocks resampled in pairs; above 1 the second side is faster.
        compared_by: "token ids" where both servers offer them, else "text".
        num_different: pairs whose outputs differ.
        differences: names of the first of them.
    """

    num_pairs: int
    ttft: Ratio
    tpot: Ratio
    e2e: Ratio
    output_throughput: Ratio
    compared_by: str
    num_different: int
    differences: tuple[str, ...]


def compare(first: Blocks, second: Blocks) -> Comparison:
    """Compare blocks of records; block i of both sides sent the same requests."""
    pairs = _pairs(first, second)
    has_ids = all(record.token_ids is not None for pair in pairs for record in pair)
    different = [ours.name for ours, theirs in pairs if not _is_same(ours, theirs, has_ids)]
    return Comparison(
        num_pairs=len(pairs),
        ttft=_latency_ratio(pairs, ttft_ms),
        tpot=_latency_ratio(pairs, tpot_ms),
        e2e=_latency_ratio(pairs, e2e_ms),
        output_throughput=_throughput_ratio(first, second),
        compared_by="token ids" if has_ids else "text",
        num_different=len(different),
        differences=tuple(different[:_NAMED_DIFFERENCES]),
    )


def _pairs(first: Blocks, second: Blocks) -> list[tuple[RequestRecord, RequestRecord]]:
    theirs = {record.number: record for block in second for record in block if record.error is None}
    ours = sorted((r for block in first for r in block if r.error is None), key=lambda record: record.number)
    return [(record, theirs[record.number]) for record in ours if record.number in theirs]


def _is_same(ours: RequestRecord, theirs: RequestRecord, has_ids: bool) -> bool:
    if ours.finish_reason != theirs.finish_reason:
        return False
    return ours.token_ids == theirs.token_ids if has_ids else ours.text == theirs.text


def _latency_ratio(
    pairs: Sequence[tuple[RequestRecord, RequestRecord]], span: Callable[[RequestRecord], float | None]
) -> Ratio:
    spans = [(span(ours), span(theirs)) for ours, theirs in pairs]
    known = [(ours, theirs) for ours, theirs in spans if ours is not None and theirs is not None]
    return _ratio([(theirs, 1) for _, theirs in known], [(ours, 1) for ours, _ in known])


def _throughput_ratio(first: Blocks, second: Blocks) -> Ratio:
    both = [(ours, theirs) for ours, theirs in zip(first, second, strict=False) if ours and theirs]
    return _ratio([_rate(theirs) for _, theirs in both], [_rate(ours) for ours, _ in both])


def _rate(block: Sequence[RequestRecord]) -> tuple[float, float]:
    tokens = sum(record.completion_tokens for record in block if record.error is None)
    return tokens, duration_s(block)


def _ratio(amounts: Counts, baseline: Counts) -> Ratio:
    means = [_mean(counts) for counts in (amounts, baseline)]
    if means[0] is None or not means[1]:
        return Ratio(None, None)
    return Ratio(means[0] / means[1], ratio_interval(amounts, baseline))


def _mean(counts: Counts) -> float | None:
    amount, whole = sum(pair[0] for pair in counts), sum(pair[1] for pair in counts)
    return amount / whole if whole > 0 else None
