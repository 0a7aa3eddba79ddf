"""How well a predicted chance matches what happened: calibration error, ranking, and the bins of a reliability plot."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.config.errors import DSparkError

NUM_BINS = 15


@dataclass(frozen=True)
class ReliabilityBin:
    """The observations whose predicted chance falls into one interval.

    Attributes:
        count: how many.
        predicted: their mean predicted chance.
        observed: the share of them that happened.
    """

    count: int
    predicted: float
    observed: float


def reliability_bins(predicted: ArrayLike, observed: ArrayLike, num_bins: int = NUM_BINS) -> list[ReliabilityBin]:
    """Group observations into bins of equal width over [0, 1]; empty bins are left out.

    A chance on an edge belongs to the bin above it, and 1 to the last bin.

    Args:
        predicted: [N] chances in [0, 1].
        observed: [N] bool or 0/1.
        num_bins: >= 1.

    Raises:
        DSparkError: the lengths differ, or a chance lies outside [0, 1].
    """
    chances, outcomes = _as_pairs(predicted, observed)
    if chances.size and not (chances.min() >= 0.0 and chances.max() <= 1.0):
        raise DSparkError("a predicted chance must lie in [0, 1]")
    places = np.minimum((chances * num_bins).astype(np.int64), num_bins - 1)
    counts = np.bincount(places, minlength=num_bins)
    chance_sums = np.bincount(places, weights=chances, minlength=num_bins)
    outcome_sums = np.bincount(places, weights=outcomes, minlength=num_bins)
    return [
        ReliabilityBin(int(counts[b]), float(chance_sums[b] / counts[b]), float(outcome_sums[b] / counts[b]))
        for b in np.flatnonzero(counts)
    ]


def expected_calibration_error(predicted: ArrayLike, observed: ArrayLike, num_bins: int = NUM_BINS) -> float | None:
    """Mean distance between predicted and observed over the bins, weighted by their counts.

    Args:
        predicted, observed, num_bins: see `reliability_bins`.

    Returns:
        In [0, 1]; None without observations.
    """
    bins = reliability_bins(predicted, observed, num_bins)
    total = sum(part.count for part in bins)
    if total == 0:
        return None
    return sum(part.count * abs(part.predicted - part.observed) for part in bins) / total


def area_under_curve(scores: ArrayLike, positive: ArrayLike) -> float | None:
    """Chance that a positive outranks a negative, a tie counting half: the area under the ROC curve.

    By ranks (Mann-Whitney): (sum of the positives' ranks - P (P + 1) / 2) / (P N).

    Args:
        scores: [N] any finite numbers.
        positive: [N] bool or 0/1.

    Returns:
        In [0, 1], 0.5 for scores that tell nothing; None where one of the two kinds is missing.

    Raises:
        DSparkError: the lengths differ.
    """
    values, labels = _as_pairs(scores, positive)
    num_positive = int(labels.sum())
    num_negative = labels.size - num_positive
    if num_positive == 0 or num_negative == 0:
        return None
    rank_sum = float(_ranks(values)[labels > 0].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1, equal values sharing the mean of theirs: 5, 7, 7, 9 have 1, 2.5, 2.5, 4."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: NDArray[np.float64] = np.cumsum(counts).astype(np.float64)
    return (last - (counts - 1) / 2)[place]


def _as_pairs(first: ArrayLike, second: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    left, right = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if left.shape != right.shape or left.ndim != 1:
        raise DSparkError(f"predictions {left.shape} and outcomes {right.shape} must be two lists of one length")
    return left, right
