"""Statistics count abstentions, merge exactly, and carry intervals."""

import pytest

from dspark.speculative import AcceptanceStatistics, wilson


def example() -> AcceptanceStatistics:
    stats = AcceptanceStatistics(3)
    stats.record(3, 3)
    stats.record(3, 1)
    stats.record(1, 1, num_emitted=1)
    stats.record(0, 0, num_drafted=3)
    stats.record(0, 0)
    return stats


def test_by_hand():
    stats = example()
    assert stats.rounds == 5
    assert stats.drafted == [4, 4, 4]
    assert stats.verified == [3, 2, 2]
    assert stats.reached == [3, 2, 1]
    assert stats.accepted == [3, 1, 1]
    assert stats.verify_lens == [2, 1, 0, 2]
    assert stats.accepted_lens == [2, 2, 0, 1]
    assert stats.emitted_tokens == 4 + 2 + 1 + 1 + 1
    assert stats.target_rows == 12
    assert stats.accepted_len().value == 2.0
    assert stats.wasted_rows().value == pytest.approx(2 / 12)


def test_abstentions_count_in_rates_but_not_in_the_verified_rate():
    """A cut that verifies one sure draft and skips three rounds must not report 100 %."""
    stats = AcceptanceStatistics(2)
    stats.record(1, 1)
    for _ in range(3):
        stats.record(0, 0, num_drafted=2)
    assert stats.unconditional(1).value == 0.25
    assert stats.conditional(1).value == 0.25
    assert stats.accepted_of_verified(1).value == 1.0
    assert stats.conditional(2).value == 0.0
    assert stats.accepted_of_verified(2).value is None


def test_conditional_uses_the_accepted_prefix():
    stats = example()
    assert [stats.conditional(k).value for k in (1, 2, 3)] == [3 / 4, 1 / 3, 1.0]
    assert [stats.unconditional(k).value for k in (1, 2, 3)] == [3 / 4, 1 / 4, 1 / 4]


def test_merge_is_the_sum_and_survives_json():
    whole, left, right = (AcceptanceStatistics(3) for _ in range(3))
    for part, rounds in ((left, [(3, 2), (2, 2)]), (right, [(0, 0), (3, 0), (1, 1)])):
        for verify_len, num_accepted in rounds:
            whole.record(verify_len, num_accepted)
            part.record(verify_len, num_accepted)
    left.merge(right)
    assert left.to_dict() == whole.to_dict()
    assert AcceptanceStatistics.from_dict(whole.to_dict()) == whole
    with pytest.raises(ValueError, match="3 and 2"):
        whole.merge(AcceptanceStatistics(2))


@pytest.mark.parametrize("arguments", [(2, 3), (4, 1), (-1, 0)])
def test_impossible_rounds_are_refused(arguments):
    with pytest.raises(ValueError, match="must not decrease"):
        AcceptanceStatistics(3).record(*arguments)


def test_wilson_known_values():
    interval = wilson(8, 10)
    assert interval.value == 0.8
    assert interval.low == pytest.approx(0.4901625, abs=1e-6)
    assert interval.high == pytest.approx(0.9433178, abs=1e-6)
    assert wilson(0, 5).low == 0.0
    assert wilson(5, 5).high == 1.0
    assert wilson(0, 0).value is None


def test_the_mean_has_an_interval_from_two_rounds_on():
    stats = AcceptanceStatistics(5)
    assert stats.accepted_len().value is None
    stats.record(5, 2)
    assert stats.accepted_len().low is None
    stats.record(5, 4)
    interval = stats.accepted_len()
    assert interval.low < interval.value == 4.0 < interval.high


def test_the_table_has_a_line_per_position():
    lines = example().table().splitlines()
    assert len(lines) == 3 + 3
    assert "2.00" in lines[0]
    assert AcceptanceStatistics(2).table()
