"""Forced acceptance follows the minimum-variance schedule, emits the drafts' own ids, and says no to nonsense."""

import pytest
import torch

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.sampling import RequestSampling
from dspark.speculative import ForcedAcceptance, VerifySpan


def span(seed=0, position=10, drafts=(1, 2, 3, 4, 5, 6, 7)):
    return VerifySpan(seed, RequestSampling(SamplingParams(seed=seed), 1, [0] * (position + 1)), list(drafts))


def test_the_minimum_variance_schedule():
    assert ForcedAcceptance.from_length(3.78, 7).probabilities == (1.0, 1.0, 0.78, 0.0, 0.0, 0.0, 0.0)
    assert ForcedAcceptance.from_length(1, 3).probabilities == (0.0, 0.0, 0.0)
    assert ForcedAcceptance.from_length(4, 3).probabilities == (1.0, 1.0, 1.0)
    assert ForcedAcceptance.from_rate(0.5, 5).probabilities == (1.0, 1.0, 0.5, 0.0, 0.0)
    assert ForcedAcceptance.from_length(3.51, 5).accepted_len == pytest.approx(3.51)


def test_options():
    assert ForcedAcceptance.from_options(5) is None
    assert ForcedAcceptance.from_options(5, length=2.0) == ForcedAcceptance.from_options(5, rate=0.2)
    with pytest.raises(ConfigError, match="give one of them"):
        ForcedAcceptance.from_options(5, length=2.0, rate=0.2)


@pytest.mark.parametrize("length", [0.99, 6.01, float("nan"), float("inf")])
def test_lengths_out_of_range_are_refused(length):
    with pytest.raises(ConfigError, match="between 1 and 6"):
        ForcedAcceptance.from_length(length, 5)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_rates_out_of_range_are_refused(rate):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        ForcedAcceptance.from_rate(rate, 5)


def test_the_mean_is_what_was_asked_for():
    forced = ForcedAcceptance.from_length(3.78, 7)
    counts = forced.num_accepted([span(seed, position) for seed in range(40) for position in range(50)])
    assert set(counts) == {2, 3}
    assert 1 + sum(counts) / len(counts) == pytest.approx(3.78, abs=4 * (0.78 * 0.22 / 2000) ** 0.5)
    assert counts[:10] == forced.num_accepted([span(0, position) for position in range(10)])


def test_accepted_positions_emit_drafts_and_the_bonus_is_the_targets():
    logits = torch.zeros(5 + 1 + 3, 20)
    logits[torch.arange(9), torch.arange(9) + 10] = 1.0
    spans = [span(0, drafts=(1, 2, 3, 4)), span(1, drafts=()), span(2, drafts=(5, 6))]
    verdict = ForcedAcceptance.from_length(3.0, 4).verify(logits, spans)
    assert verdict.token_ids == [[1, 2, 12], [15], [5, 6, 18]]
    assert verdict.num_accepted == [2, 0, 2]
    assert verdict.row_starts == [0, 5, 6]
    assert verdict.request_ids == (0, 1, 2)
