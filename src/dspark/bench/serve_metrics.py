"""Latencies, throughput and errors out of the records of requests, as the serving benchmarks of the field define them.

All spans are the client's, in milliseconds:

- TTFT: from sending the request to its first chunk with text (an empty first chunk is not an answer).
- E2E: from sending it to its last chunk with text or a finish reason; the closing usage event is not waited for.
- TPOT: (E2E - TTFT) / (completion tokens - 1), one value a request; requests of one token have none.
- chunk gap: between two successive chunks of a request; speculation puts several tokens in one.
- ITL: where the server says how many tokens a chunk holds, each of its n tokens counts as gap / n; elsewhere the
  chunk gaps themselves.

Percentiles interpolate linearly. Token counts are the server's usage. Failed requests are counted by kind and enter
no other figure; warm-up requests enter none at all.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dspark.bench.serve_client import RequestRecord

TOKENS, CHUNKS = "tokens", "chunks"
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latency:
    """A distribution of spans, ms."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int


@dataclass(frozen=True)
class Figures:
    """One side under one load.

    Attributes:
        num_requests: that succeeded. All other figures are of these.
        num_failed, errors: that did not, and how many of each kind.
        num_warmup, num_warmup_failed: that were sent before and are in no figure.
        duration_s: from the first sending to the last end, summed over blocks.
        request_throughput, output_throughput, total_throughput: requests, completion tokens, and prompt and completion
            tokens a second.
        mean_concurrency: requests in flight on average.
        max_lateness_ms: by how much the client itself sent a request too late.
        itl_basis: "tokens" or "chunks", see the module.
        accepted_len: tokens of a speculative round, bonus included; None where the server does not say.
        accepted_len_source: "responses" or "metrics".
        acceptance: share of rounds in which draft position k was accepted, from the server's metrics.
    """

    num_requests: int
    num_failed: int
    errors: dict[str, int]
    num_warmup: int
    num_warmup_failed: int
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    mean_concurrency: float
    max_lateness_ms: float
    ttft: Latency | None
    itl: Latency | None
    itl_basis: str
    tpot: Latency | None
    e2e: Latency | None
    chunk_gap: Latency | None
    accepted_len: float | None
    accepted_len_source: str | None
    acceptance: tuple[float, ...]


@dataclass(frozen=True)
class Rounds:
    """Speculative rounds as a server counts them.

    Args:
        num_rounds: verified blocks.
        num_accepted: accepted drafts, bonus not counted.
        per_position: accepted at draft position k = 1, 2 ...
    """

    num_rounds: int
    num_accepted: int
    per_position: tuple[int, ...] = ()


def ttft_ms(record: RequestRecord) -> float:
    """Of a request that succeeded."""
    return 1e3 * (record.arrivals[0][0] - record.sent)


def e2e_ms(record: RequestRecord) -> float:
    """Of a request that succeeded."""
    assert record.last is not None  # a success has a finish reason, and its chunk a moment
    return 1e3 * (record.last - record.sent)


def tpot_ms(record: RequestRecord) -> float | None:
    """Of a request that succeeded; None with a single token."""
    if record.completion_tokens < 2:
        return None
    return (e2e_ms(record) - ttft_ms(record)) / (record.completion_tokens - 1)


def chunk_gaps_ms(record: RequestRecord) -> list[float]:
    """Between its chunks, one fewer than chunks."""
    moments = [moment for moment, _ in record.arrivals]
    return [1e3 * (late - early) for early, late in pairwise(moments)]


def token_gaps_ms(record: RequestRecord) -> list[float]:
    """One value for each token after the first chunk; the server must have said how many each chunk holds."""
    counts = [count or 0 for _, count in record.arrivals[1:]]
    gaps = zip(chunk_gaps_ms(record), counts, strict=True)
    return [gap / count for gap, count in gaps for _ in range(count)]


def latency(values: Iterable[float | None]) -> Latency | None:
    """The distribution of the values that there are; None without any."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(known, _PERCENTILES))
    return Latency(float(known.mean()), p50, p90, p99, int(known.size))


def figures_of(
    blocks: Sequence[Sequence[RequestRecord]],
    *,
    warmup: Sequence[RequestRecord] = (),
    rounds: Rounds | None = None,
) -> Figures:
    """Sum up the records of one side under one load.

    Args:
        blocks: records of the stretches in which this side was measured; the time between them does not count.
        warmup: records of the requests before.
        rounds: of the stretches, from the server's metrics; read where the responses do not tell.
    """
    records = [record for block in blocks for record in block]
    done = [record for record in records if record.error is None]
    failed = [record for record in records if record.error is not None]
    duration = sum(duration_s(block) for block in blocks)
    prompt_tokens, completion_tokens = (sum(column) for column in _token_columns(done))
    knows_tokens = bool(done) and all(count is not None for record in done for _, count in record.arrivals)
    accepted_len, source = _accepted_len(done, rounds)
    return Figures(
        num_requests=len(done),
        num_failed=len(failed),
        errors=dict(sorted(Counter(record.error or "" for record in failed).items())),
        num_warmup=len(warmup),
        num_warmup_failed=sum(record.error is not None for record in warmup),
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=sum(record.cached_tokens for record in done),
        request_throughput=_per(len(done), duration),
        output_throughput=_per(completion_tokens, duration),
        total_throughput=_per(prompt_tokens + completion_tokens, duration),
        mean_concurrency=_per(sum(record.ended - record.sent for record in records), duration),
        max_lateness_ms=1e3 * max((record.sent - record.due for record in records), default=0.0),
        ttft=latency(map(ttft_ms, done)),
        itl=latency(gap for record in done for gap in (token_gaps_ms if knows_tokens else chunk_gaps_ms)(record)),
        itl_basis=TOKENS if knows_tokens else CHUNKS,
        tpot=latency(map(tpot_ms, done)),
        e2e=latency(map(e2e_ms, done)),
        chunk_gap=latency(gap for record in done for gap in chunk_gaps_ms(record)),
        accepted_len=accepted_len,
        accepted_len_source=source,
        acceptance=() if rounds is None else tuple(_per(count, rounds.num_rounds) for count in rounds.per_position),
    )


def _token_columns(done: Sequence[RequestRecord]) -> tuple[list[int], list[int]]:
    return [record.prompt_tokens for record in done], [record.completion_tokens for record in done]


def duration_s(block: Sequence[RequestRecord]) -> float:
    """From the first sending to the last end of a stretch; 0 without a request."""
    if not block:
        return 0.0
    return max(record.ended for record in block) - min(record.sent for record in block)


def _per(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0


def _accepted_len(done: Sequence[RequestRecord], rounds: Rounds | None) -> tuple[float | None, str | None]:
    told = [record for record in done if record.rounds]
    if told:
        tokens, num_rounds = sum(r.accepted_tokens or 0.0 for r in told), sum(r.rounds or 0 for r in told)
        return tokens / num_rounds, "responses"
    if rounds is not None and rounds.num_rounds > 0:
        return 1 + rounds.num_accepted / rounds.num_rounds, "metrics"
    return None, None
