"""Algorithm 1 against its loop as the paper writes it, and the promises that a scheduler gives its callers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.speculative import schedule_lengths

probability = st.floats(0.0, 1.0)


@st.composite
def cases(draw):
    """(survival [R, G] non-increasing, steps per second for every row count)."""
    num_requests, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    confidence = draw(
        st.lists(st.lists(probability, min_size=width, max_size=width), min_size=num_requests, max_size=num_requests)
    )
    most = num_requests * (width + 1)
    curve = draw(st.lists(st.floats(0.01, 100.0), min_size=most + 1, max_size=most + 1))
    if draw(st.booleans()):
        curve = sorted(curve, reverse=True)
    return np.cumprod(np.array(confidence), axis=1), curve


def plain_early_stop(survival, curve):
    """Algorithm 1, one admission after the other."""
    num_requests, width = survival.shape
    order = sorted((-survival[r, j], r, j) for r in range(num_requests) for j in range(width))
    lengths, rows, tau = [0] * num_requests, num_requests, float(num_requests)
    best, gained = tau * curve[rows], 0.0
    for negative, request, _ in order:
        gained += -negative
        rows += 1
        throughput = (num_requests + gained) * curve[rows]
        if throughput <= best:
            break
        best = throughput
        lengths[request] += 1
    return lengths


def throughput(survival, curve, lengths):
    """Expected tokens per second of a choice."""
    tau = sum(1 + row[:n].sum() for row, n in zip(survival, lengths, strict=True))
    return tau * curve[len(lengths) + sum(lengths)]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_early_stop_is_the_papers_loop(case):
    survival, curve = case
    assert schedule_lengths(survival, curve) == plain_early_stop(survival, curve)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_neither_search_is_below_plain_decoding_and_global_is_the_best(case):
    survival, curve = case
    plain = throughput(survival, curve, [0] * len(survival))
    early = throughput(survival, curve, schedule_lengths(survival, curve))
    best = throughput(survival, curve, schedule_lengths(survival, curve, search="global"))
    assert early >= plain * (1 - 1e-12)
    assert best >= early * (1 - 1e-12)


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(["early_stop", "global"]), st.data())
def test_lengths_respect_width_limits_and_budget(case, search, data):
    survival, curve = case
    num_requests, width = survival.shape
    limits = data.draw(st.lists(st.integers(0, width), min_size=num_requests, max_size=num_requests))
    max_rows = data.draw(st.integers(0, num_requests * (width + 1)))
    lengths = schedule_lengths(survival, curve, search=search, limits=limits, max_rows=max_rows)
    assert all(0 <= n <= limit for n, limit in zip(lengths, limits, strict=True))
    assert sum(lengths) <= max(max_rows - num_requests, 0)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_early_stop_does_not_look_ahead(case, data):
    """Whether draft k is verified is the same whatever survivals come after position k of that request."""
    survival, curve = case
    num_requests, width = survival.shape
    request, k = data.draw(st.integers(0, num_requests - 1)), data.draw(st.integers(1, width))
    changed = survival.copy()
    shrink = np.array(data.draw(st.lists(probability, min_size=width - k, max_size=width - k)))
    changed[request, k:] = survival[request, k - 1] * np.cumprod(shrink)
    before = schedule_lengths(survival, curve)[request]
    after = schedule_lengths(changed, curve)[request]
    assert (before >= k) == (after >= k)
