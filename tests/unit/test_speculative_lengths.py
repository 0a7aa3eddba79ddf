"""Verify lengths: fixed width, threshold and Algorithm 1, each on numbers that can be checked by hand."""

import numpy as np
import pytest

from dspark.config.errors import ConfigError
from dspark.speculative import (
    FixedLengths,
    ThresholdLengths,
    ThroughputLengths,
    drafting_pays,
    fixed_lengths,
    schedule_lengths,
    threshold_lengths,
)


def test_fixed_lengths_respect_limits():
    assert fixed_lengths(3, 5) == [5, 5, 5]
    assert fixed_lengths(3, 5, [2, 9, -1]) == [2, 5, 0]


def test_threshold_cuts_the_prefix_and_keeps_equality():
    survival = [[0.9, 0.5, 0.4], [0.4, 0.3, 0.2], [0.5, 0.5, 0.5], [1.0, 0.2, 0.9]]
    assert threshold_lengths(survival, 0.5) == [2, 0, 3, 1]
    assert threshold_lengths(survival, 0.0, [1, 3, 0, 3]) == [1, 3, 0, 3]


def test_a_flat_curve_admits_every_positive_survival():
    assert schedule_lengths([[0.9, 0.5], [0.4, 0.1]], [1.0] * 7) == [2, 2]
    assert schedule_lengths([[0.9, 0.0], [0.0, 0.0]], [1.0] * 7) == [1, 0]


def test_by_hand():
    # B:            1     2     3     4
    curve = [0.0, 10.0, 9.0, 7.0, 7.0]
    # tau * SPS: 10.0, 1.9 * 9 = 17.1, 2.6 * 7 = 18.2, 2.7 * 7 = 18.9
    assert schedule_lengths([[0.9, 0.7, 0.1]], curve) == [3]
    # 10.0, 1.5 * 9 = 13.5, 1.9 * 7 = 13.3 (stop), 2.2 * 7 = 15.4
    assert schedule_lengths([[0.5, 0.4, 0.3]], curve) == [1]
    assert schedule_lengths([[0.5, 0.4, 0.3]], curve, search="global") == [3]


def test_a_falling_curve_chooses_zero():
    curve = [0.0] + [1.0 / (1 + rows) ** 2 for rows in range(1, 20)]
    assert schedule_lengths([[0.9, 0.8], [0.9, 0.8]], curve) == [0, 0]
    assert schedule_lengths([[0.9, 0.8], [0.9, 0.8]], curve, search="global") == [0, 0]


def test_ties_go_to_the_lower_request_then_position():
    survival = np.full((3, 2), 0.5)
    flat = [1.0] * 10
    assert [schedule_lengths(survival, flat, max_rows=3 + n) for n in range(7)] == [
        [0, 0, 0],
        [1, 0, 0],
        [2, 0, 0],
        [2, 1, 0],
        [2, 2, 0],
        [2, 2, 1],
        [2, 2, 2],
    ]


def test_limits_pass_their_rows_to_others():
    assert schedule_lengths([[0.9, 0.8], [0.3, 0.2]], [1.0] * 9, limits=[0, 2], max_rows=4) == [0, 2]


def test_edges():
    assert schedule_lengths(np.empty((0, 5)), [1.0]) == []
    assert schedule_lengths(np.empty((2, 0)), [1.0] * 3) == [0, 0]
    assert schedule_lengths([[0.9, 0.9]], [1.0, 1.0], max_rows=5) == [0]
    assert schedule_lengths([[0.9], [0.9]], [1.0] * 9, max_rows=1) == [0, 0]


def test_errors_name_the_values():
    with pytest.raises(ConfigError, match=r"ends at 2 rows, but 3 requests"):
        schedule_lengths(np.ones((3, 2)), [1.0] * 3)
    with pytest.raises(ConfigError, match="early_stop"):
        schedule_lengths([[1.0]], [1.0] * 3, search="best")


def test_drafting_pays_compares_with_plain_decoding():
    survival = [[0.8, 0.6]]
    assert drafting_pays(survival, [0, 9.0, 9.0, 9.0], [0, 10.0, 10.0, 10.0])
    assert not drafting_pays(survival, [0, 5.0, 4.0, 3.0], [0, 10.0, 9.0, 8.0])
    assert not drafting_pays([[0.0, 0.0]], [0, 9.0, 9.0, 9.0], [0, 10.0, 9.0, 9.0])


def test_policies_are_the_functions():
    survival = np.array([[0.9, 0.6], [0.5, 0.1]])
    assert FixedLengths().choose(survival, [2, 1]) == [2, 1]
    assert ThresholdLengths(0.5).choose(survival) == [2, 1]
    curve = [1.0] * 9
    assert ThroughputLengths(curve, max_rows=4).choose(survival) == schedule_lengths(survival, curve, max_rows=4)
    assert [p.uses_confidence for p in (FixedLengths(), ThresholdLengths(0.5), ThroughputLengths(curve))] == [
        False,
        True,
        True,
    ]
