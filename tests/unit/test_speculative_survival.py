"""Survival is the running product of scaled confidences, and a row of it depends on that row alone."""

import numpy as np
import pytest
import torch

from dspark.config.errors import ConfigError
from dspark.speculative import compute_survival


def test_by_hand():
    logits = torch.tensor([[0.0, 2.0], [-1.0, 0.0]])
    confidence = 1 / (1 + np.exp(-logits.double().numpy()))
    np.testing.assert_allclose(compute_survival(logits), np.cumprod(confidence, axis=1), rtol=1e-6)
    scaled = 1 / (1 + np.exp(-logits.double().numpy() / np.array([2.0, 0.5])))
    np.testing.assert_allclose(compute_survival(logits, [2.0, 0.5, 9.0]), np.cumprod(scaled, axis=1), rtol=1e-6)


def test_rows_are_independent_and_never_rise():
    logits = torch.randn(13, 5, generator=torch.Generator().manual_seed(0)) * 4
    together = compute_survival(logits, [1.1, 0.9, 1.3, 2.0, 0.7])
    assert (np.diff(together, axis=1) <= 0).all()
    for r in range(13):
        alone = compute_survival(logits[r : r + 1], [1.1, 0.9, 1.3, 2.0, 0.7])
        assert (alone[0] == together[r]).all()


@pytest.mark.parametrize("temperatures", [[1.0], [1.0, 0.0], [1.0, float("nan")]])
def test_bad_temperatures_are_refused(temperatures):
    with pytest.raises(ConfigError, match="2 positive numbers"):
        compute_survival(torch.zeros(1, 2), temperatures)


def test_extreme_logits_give_zero_and_one():
    assert compute_survival(torch.tensor([[200.0, -200.0]])).tolist() == [[1.0, 0.0]]
