"""Calibration error, area under the curve and resampled intervals on cases that can be worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.bench.bootstrap import mean_interval, ratio_interval
from dspark.bench.calibration import ReliabilityBin, area_under_curve, expected_calibration_error, reliability_bins
from dspark.config.errors import DSparkError


def test_a_chance_that_is_right_on_average_has_no_error():
    assert expected_calibration_error([0.25] * 4, [1, 0, 0, 0]) == pytest.approx(0.0)


def test_the_error_is_weighted_by_the_count_of_a_bin():
    # Three in one bin at 0.9 of which one happened, one at 0.1 that happened: (3 * |0.9 - 1/3| + |0.1 - 1|) / 4.
    error = expected_calibration_error([0.9, 0.9, 0.9, 0.1], [1, 0, 0, 1])
    assert error == pytest.approx((3 * (0.9 - 1 / 3) + 0.9) / 4)


def test_errors_of_opposite_sign_cancel_within_a_bin_only():
    assert expected_calibration_error([0.4, 0.6], [1, 0], num_bins=1) == pytest.approx(0.0)
    assert expected_calibration_error([0.4, 0.6], [1, 0], num_bins=2) == pytest.approx(0.6)


def test_edges_belong_to_the_bin_above_and_one_to_the_last():
    bins = reliability_bins([0.0, 0.5, 1.0], [0, 1, 1], num_bins=2)
    assert bins == [ReliabilityBin(1, 0.0, 0.0), ReliabilityBin(2, 0.75, 1.0)]


def test_nothing_observed_is_no_number():
    assert expected_calibration_error([], []) is None
    assert area_under_curve([], []) is None
    assert area_under_curve([0.1, 0.2], [1, 1]) is None
    assert reliability_bins([], []) == []


@pytest.mark.parametrize(
    ("scores", "positive", "area"),
    [
        ([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1], 1.0),
        ([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0], 0.0),
        ([0.5, 0.5, 0.5], [1, 0, 1], 0.5),
        ([1, 2, 3, 4], [0, 1, 0, 1], 0.75),
        ([1, 2, 2, 3], [0, 1, 0, 1], 3.5 / 4),
    ],
)
def test_area_under_the_curve(scores, positive, area):
    assert area_under_curve(scores, positive) == pytest.approx(area)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_the_area_counts_pairs(observations):
    scores, positive = np.array(observations, dtype=float).T
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive == 1] for b in scores[positive == 0]]
    area = area_under_curve(scores, positive)
    assert area is None if not pairs else area == pytest.approx(np.mean(pairs))


def test_mistakes_are_refused():
    with pytest.raises(DSparkError, match=r"\[0, 1\]"):
        expected_calibration_error([1.5], [1])
    with pytest.raises(DSparkError, match="one length"):
        area_under_curve([0.1, 0.2], [1])
    with pytest.raises(DSparkError, match="same prompts"):
        ratio_interval([(1, 1)], [(1, 1), (2, 1)])


def test_an_interval_of_means_encloses_the_mean_and_repeats():
    counts = [(30, 10), (20, 10), (45, 12), (9, 6), (27, 9)]
    low, high = mean_interval(counts)
    assert 1.5 <= low < 131 / 47 < high <= 3.75
    assert mean_interval(counts) == (low, high)
    assert mean_interval([(30, 10)]) is None
    assert mean_interval([(30, 10), (0, 0)]) is None


def test_equal_prompts_leave_no_doubt():
    assert mean_interval([(6, 2)] * 4) == pytest.approx((3.0, 3.0))


def test_a_paired_ratio_is_surer_than_its_parts():
    # Prompts differ among themselves by a factor of three, and each is exactly 1.2 times its baseline.
    counts, baseline = [(12, 10), (24, 10), (36, 10)], [(10, 10), (20, 10), (30, 10)]
    assert ratio_interval(counts, baseline) == pytest.approx((1.2, 1.2))
    low, high = mean_interval(counts)
    assert high / low > 2
