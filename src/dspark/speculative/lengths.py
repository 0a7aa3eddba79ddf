"""Verify lengths: how many drafts of each request go to the target. Integers and plain numbers, no torch.

Fixed width and threshold decide each request alone. `schedule_lengths` is the paper's Algorithm 1 for a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.config.errors import ConfigError

Search = Literal["early_stop", "global"]


def fixed_lengths(num_requests: int, width: int, limits: Sequence[int] | None = None) -> list[int]:
    """Verify `width` drafts of every request, or fewer where `limits` [R] says so."""
    return _clip([width] * num_requests, limits)


def threshold_lengths(survival: ArrayLike, threshold: float, limits: Sequence[int] | None = None) -> list[int]:
    """Verify the prefix whose survival stays at or above `threshold`.

    Args:
        survival: [R, G] in [0, 1].
        threshold: in [0, 1].
        limits: [R] largest verify_len of each request.
    """
    kept = np.asarray(survival, dtype=np.float64) >= threshold
    return _clip([int(n) for n in np.cumprod(kept, axis=1).sum(axis=1)], limits)


def schedule_lengths(
    survival: ArrayLike,
    steps_per_second: Sequence[float],
    *,
    search: Search = "early_stop",
    limits: Sequence[int] | None = None,
    max_rows: int | None = None,
) -> list[int]:
    """Choose verify lengths that maximise expected tokens per second (DSpark sec. 3.2.2, Alg. 1).

    From R rows (anchors only) and R expected tokens, drafts are admitted in descending order of survival, ties to the
    lower request, then to the lower position. "early_stop" ends at the first admission that does not raise
    tau * SPS(B), so whether draft k is verified does not depend on later drafts: the ratio test stays lossless.
    "global" takes the best prefix of the whole order, the smallest one among equals. Width 0 is always a candidate.

    Args:
        survival: [R, G] in [0, 1], non-increasing along G.
        steps_per_second: SPS(B) at index B in rows of the target pass; entry 0 is not read.
        search: see above.
        limits: [R] largest verify_len of each request; a limit must not depend on draft contents.
        max_rows: largest B, anchors counted.
    Returns:
        [R] verify lengths.
    Raises:
        ConfigError: the curve has no entry for R rows, or `search` is unknown.
    """
    if search not in ("early_stop", "global"):
        raise ConfigError(f'search must be "early_stop" or "global", not {search!r}')
    values = np.asarray(survival, dtype=np.float64)
    num_requests = values.shape[0]
    if num_requests == 0:
        return []
    if num_requests >= len(steps_per_second):
        raise ConfigError(
            f"the profile's steps_per_second ends at {len(steps_per_second) - 1} rows, but {num_requests} requests "
            "are running; calibrate with a larger batch"
        )
    most = len(steps_per_second) - 1 if max_rows is None else min(max_rows, len(steps_per_second) - 1)
    requests, gains = _admission_order(values, limits, max(most - num_requests, 0))
    tau = num_requests + np.concatenate(([0.0], np.cumsum(gains)))
    curve = np.asarray(steps_per_second, dtype=np.float64)[num_requests : num_requests + len(tau)]
    throughput = tau * curve
    if search == "global":
        admitted = int(np.argmax(throughput))
    else:
        stops = np.flatnonzero(throughput[1:] <= throughput[:-1])
        admitted = int(stops[0]) if stops.size else len(gains)
    return [int(n) for n in np.bincount(requests[:admitted], minlength=num_requests)]


def _admission_order(
    survival: NDArray[np.float64], limits: Sequence[int] | None, budget: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Request index and survival of each candidate draft, best first, at most `budget` of them."""
    num_requests, width = survival.shape
    request, position = np.divmod(np.arange(num_requests * width), max(width, 1))
    # The running minimum keeps prefixes in order even if a caller's survival rises by rounding.
    gain = np.minimum.accumulate(survival, axis=1).ravel()
    order = np.lexsort((position, request, -gain))
    if limits is not None:
        order = order[position[order] < np.asarray(limits)[request[order]]]
    order = order[:budget]
    return request[order], gain[order]


def drafting_pays(
    survival: ArrayLike, steps_per_second: Sequence[float], plain_steps_per_second: Sequence[float]
) -> bool:
    """Tell whether the best schedule with a draft pass beats plain decoding without one.

    Args:
        survival: [R, G], expected for the next round.
        steps_per_second: rounds per second at B rows, draft pass included.
        plain_steps_per_second: steps per second at B rows without a draft pass.
    """
    values = np.asarray(survival, dtype=np.float64)
    lengths = schedule_lengths(values, steps_per_second, search="global")
    tau = sum(1.0 + float(row[:n].sum()) for row, n in zip(values, lengths, strict=True))
    rows = len(lengths) + sum(lengths)
    return tau * steps_per_second[rows] > len(lengths) * plain_steps_per_second[len(lengths)]


def _clip(lengths: list[int], limits: Sequence[int] | None) -> list[int]:
    """Element-wise minimum with `limits`."""
    if limits is None:
        return lengths
    return [max(min(n, limit), 0) for n, limit in zip(lengths, limits, strict=True)]


class LengthPolicy(Protocol):
    """Chooses verify lengths for a batch."""

    uses_confidence: bool

    def choose(self, survival: ArrayLike, limits: Sequence[int] | None = None) -> list[int]:
        """Verify lengths [R] from survival [R, G]; a policy that does not use confidence reads only its shape."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Verify everything that was drafted."""

    uses_confidence = False

    def choose(self, survival: ArrayLike, limits: Sequence[int] | None = None) -> list[int]:
        """See `fixed_lengths`."""
        num_requests, width = np.shape(survival)
        return fixed_lengths(num_requests, width, limits)


@dataclass(frozen=True, slots=True)
class ThresholdLengths:
    """Cut each block where its survival falls below a threshold."""

    threshold: float
    uses_confidence = True

    def choose(self, survival: ArrayLike, limits: Sequence[int] | None = None) -> list[int]:
        """See `threshold_lengths`."""
        return threshold_lengths(survival, self.threshold, limits)


@dataclass(frozen=True, slots=True)
class ThroughputLengths:
    """Maximise expected tokens per second with a calibrated curve."""

    steps_per_second: Sequence[float]
    search: Search = "early_stop"
    max_rows: int | None = None
    uses_confidence = True

    def choose(self, survival: ArrayLike, limits: Sequence[int] | None = None) -> list[int]:
        """See `schedule_lengths`."""
        return schedule_lengths(
            survival, self.steps_per_second, search=self.search, limits=limits, max_rows=self.max_rows
        )
