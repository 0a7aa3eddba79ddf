"""Intervals by resampling whole prompts: the rounds of one prompt resemble each other, so they are not independent."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.config.errors import DSparkError

NUM_RESAMPLES = 4000
# Limits of a two-sided 95 % interval.
_LIMITS = (2.5, 97.5)

Interval = tuple[float, float]
Counts = Sequence[tuple[float, float]]
"""For each prompt: an amount and what it is counted by, e.g. tokens with the bonus of each round, and rounds."""


def mean_interval(counts: Counts, seed: int = 0) -> Interval | None:
    """95 % percentile interval of tokens over rounds, prompts resampled.

    Args:
        counts: one pair a prompt.
        seed: of the resampling.

    Returns:
        (low, high); None with fewer than two prompts that had a round.
    """
    return _percentiles(_means(counts, _resamples(len(counts), seed))) if _is_enough(counts) else None


def ratio_interval(counts: Counts, baseline: Counts, seed: int = 0) -> Interval | None:
    """95 % percentile interval of one mean over another on the same prompts, each resample drawing both alike.

    Args:
        counts, baseline: one pair a prompt, in the same order.
        seed: of the resampling.

    Returns:
        (low, high); None with fewer than two prompts that had a round in both.

    Raises:
        DSparkError: the two do not cover the same number of prompts.
    """
    if len(counts) != len(baseline):
        raise DSparkError(f"a paired comparison needs the same prompts, not {len(counts)} and {len(baseline)}")
    if not (_is_enough(counts) and _is_enough(baseline)):
        return None
    chosen = _resamples(len(counts), seed)
    return _percentiles(_means(counts, chosen) / _means(baseline, chosen))


def _is_enough(counts: Counts) -> bool:
    return sum(rounds > 0 for _, rounds in counts) >= 2


def _resamples(num_prompts: int, seed: int) -> NDArray[np.int64]:
    """[N, prompts] prompt numbers, drawn with replacement."""
    return np.random.default_rng(seed).integers(0, num_prompts, (NUM_RESAMPLES, num_prompts))


def _means(counts: Counts, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """[N] tokens over rounds of each resample; NaN where it drew no round."""
    tokens, rounds = np.asarray(counts, dtype=np.float64).T
    summed: NDArray[np.float64] = rounds[chosen].sum(axis=1)
    return np.divide(tokens[chosen].sum(axis=1), summed, out=np.full_like(summed, np.nan), where=summed > 0)


def _percentiles(values: NDArray[np.float64]) -> Interval:
    low, high = np.nanpercentile(values, _LIMITS)
    return float(low), float(high)
