"""The serving benchmark's arithmetic on records with known moments: spans, percentiles, counts, ratios."""

import numpy as np
import pytest

from dspark.bench.load import OpenLoop, poisson_arrivals
from dspark.bench.serve_client import RequestRecord
from dspark.bench.serve_compare import compare
from dspark.bench.serve_metrics import Rounds, figures_of
from dspark.bench.serve_scrape import read_rounds, rounds_between
from dspark.config.errors import DSparkError


def record(number=0, sent=0.0, arrivals=((1.0, 1), (1.5, 2), (2.5, 4)), last=2.6, tokens=7, **fields):
    return RequestRecord(
        number=number,
        name=f"p{number}",
        due=sent,
        sent=sent,
        ended=sent + last + 0.4,
        arrivals=tuple((sent + moment, count) for moment, count in arrivals),
        last=sent + last,
        finish_reason="length",
        prompt_tokens=10,
        completion_tokens=tokens,
        **fields,
    )


def failure(kind, sent=0.0):
    return RequestRecord(number=9, name="x", due=sent, sent=sent, ended=sent + 1.0, error=kind)


def test_spans_are_those_of_the_documentation():
    figures = figures_of([[record()]])
    assert figures.ttft.mean == pytest.approx(1000)
    assert figures.e2e.mean == pytest.approx(2600)  # to the finish reason, not to the end of the stream
    assert figures.tpot.mean == pytest.approx((2600 - 1000) / 6)
    assert figures.chunk_gap.count == 2 and figures.chunk_gap.mean == pytest.approx(750)
    # Two tokens in half a second, four in a second: six values of 250 ms.
    assert (figures.itl_basis, figures.itl.count) == ("tokens", 6)
    assert figures.itl.mean == pytest.approx(250)


def test_without_token_counts_itl_is_the_gap_between_chunks():
    figures = figures_of([[record(arrivals=((1.0, None), (1.5, None), (2.5, None)))]])
    assert (figures.itl_basis, figures.itl.count) == ("chunks", 2)
    assert figures.itl.mean == pytest.approx(750)


def test_one_token_has_no_time_per_output_token():
    figures = figures_of([[record(arrivals=((1.0, 1),), last=1.0, tokens=1)]])
    assert figures.tpot is None and figures.itl is None
    assert figures.e2e.mean == pytest.approx(1000)


def test_percentiles_interpolate():
    records = [record(number, last=2.5 + number) for number in range(11)]
    e2e = figures_of([records]).e2e
    assert (e2e.p50, e2e.p90, e2e.p99) == pytest.approx((7500, 11500, 12400))
    assert e2e.count == 11


def test_failures_and_warm_up_are_counted_and_enter_no_figure():
    clean = figures_of([[record()]])
    figures = figures_of([[record(), failure("timeout"), failure("http 500"), failure("timeout")]], warmup=[record()])
    assert (figures.num_requests, figures.num_failed, figures.num_warmup) == (1, 3, 1)
    assert figures.errors == {"http 500": 1, "timeout": 2}
    assert figures.ttft == clean.ttft
    assert figures.output_throughput == clean.output_throughput


def test_throughput_counts_tokens_of_usage_and_only_the_time_of_its_own_blocks():
    first, second = record(sent=0.0), record(1, sent=100.0)
    figures = figures_of([[first], [second]])
    assert figures.duration_s == pytest.approx(6.0)
    assert figures.request_throughput == pytest.approx(2 / 6)
    assert figures.output_throughput == pytest.approx(14 / 6)
    assert figures.total_throughput == pytest.approx(34 / 6)
    assert figures.mean_concurrency == pytest.approx(1.0)


def test_nothing_measured_gives_no_latency_and_no_division_by_zero():
    figures = figures_of([[]])
    assert figures.ttft is None and figures.output_throughput == 0.0


def test_accepted_length_comes_from_the_responses_or_else_from_the_metrics():
    told = [record(0, rounds=3, accepted_tokens=9.0), record(1, rounds=1, accepted_tokens=1.0)]
    rounds = Rounds(10, 15, (9, 6))
    assert figures_of([told], rounds=rounds).accepted_len == pytest.approx(2.5)
    figures = figures_of([[record()]], rounds=rounds)
    assert (figures.accepted_len, figures.accepted_len_source) == (pytest.approx(2.5), "metrics")
    assert figures.acceptance == pytest.approx((0.9, 0.6))
    assert figures_of([[record()]]).accepted_len is None


@pytest.mark.parametrize("prefix", ["dspark:", "vllm:"])
def test_rounds_are_read_from_a_prometheus_page(prefix):
    page = f"""# TYPE {prefix}spec_decode_num_drafts_total counter
{prefix}spec_decode_num_drafts_total{{model="a b"}} 4.0
{prefix}spec_decode_num_accepted_tokens_total 6
{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 2.0
{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 4.0
{prefix}strange NaN of words
"""
    assert read_rounds(page) == Rounds(4, 6, (4, 2))
    assert rounds_between(Rounds(1, 1, (1, 0)), read_rounds(page)) == Rounds(3, 5, (3, 2))
    assert rounds_between(Rounds(0, 0), read_rounds(page)) == Rounds(4, 6, (4, 2))


def test_a_page_without_rounds_tells_nothing():
    assert read_rounds("up 1\n") is None and read_rounds(None) is None
    assert rounds_between(None, Rounds(1, 1)) is None


def test_ratios_compare_the_same_requests():
    slow = [[record(number, last=5.0, token_ids=(1, 2)) for number in (0, 1)]]
    fast = [[record(1, token_ids=(1, 2)), record(0, token_ids=(1, 2)), record(2, token_ids=(9,))]]
    comparison = compare(slow, fast)
    assert comparison.num_pairs == 2
    assert comparison.e2e.value == pytest.approx(2.6 / 5.0)
    assert comparison.e2e.interval == pytest.approx((2.6 / 5.0, 2.6 / 5.0))
    assert comparison.ttft.value == pytest.approx(1.0)
    assert (comparison.compared_by, comparison.num_different) == ("token ids", 0)


def test_throughput_is_compared_block_by_block():
    def blocks(seconds):
        return [[record(n, last=s, arrivals=((0.1, 1),))] for n, s in enumerate(seconds)]

    comparison = compare(blocks((1.6, 3.6)), blocks((0.6, 1.6)))
    assert comparison.output_throughput.value == pytest.approx(6 / 3)
    assert comparison.output_throughput.interval is not None
    assert compare(blocks((1.6,)), blocks((0.6,))).output_throughput.interval is None


@pytest.mark.parametrize(
    ("ours", "theirs", "by"),
    [
        ({"token_ids": (1, 2)}, {"token_ids": (1, 3)}, "token ids"),
        ({"text": "a"}, {"text": "b"}, "text"),
        ({"text": "a"}, {"text": "b", "token_ids": (1,)}, "text"),
    ],
)
def test_a_different_output_is_named(ours, theirs, by):
    comparison = compare([[record(0, **ours)]], [[record(0, **theirs)]])
    assert (comparison.num_different, comparison.differences, comparison.compared_by) == (1, ("p0",), by)


def test_failures_are_not_compared():
    comparison = compare([[record(9)]], [[failure("timeout")]])
    assert comparison.num_pairs == 0 and comparison.e2e.value is None


def test_arrivals_are_poisson_and_repeatable():
    moments = poisson_arrivals(4.0, 20_000, 7)
    gaps = np.diff(moments)
    assert moments[0] == 0.0 and moments == poisson_arrivals(4.0, 20_000, 7)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # exponential: as wide as its mean
    assert poisson_arrivals(4.0, 0, 0) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_means_nothing_is_refused(rate):
    with pytest.raises(DSparkError, match="rate"):
        OpenLoop(rate)
