"""Acceptance statistics of speculative rounds: mergeable counts, and rates with confidence intervals.

A draft that was not sent to verification counts as not accepted in every rate except `accepted_of_verified`; a cut that
verifies only sure drafts therefore cannot make acceptance look better than the tokens that it gains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval; all three are None without observations."""

    value: float | None
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Plain form for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def wilson(successes: int, trials: int, z: float = Z_95) -> Estimate:
    """Proportion with the Wilson score interval."""
    if trials == 0:
        return Estimate(None, None, None)
    share = successes / trials
    scale = 1.0 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1.0 - share) / trials + z * z / (4 * trials * trials)) / scale
    return Estimate(share, min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share))


@dataclass(slots=True)
class AcceptanceStatistics:
    """Counts over rounds; one round of one request is one observation.

    Attributes:
        block_size: largest number of drafts in a round, G.
        drafted, verified, accepted: [G] rounds in which draft position k was proposed, sent to the target, accepted.
        reached: [G] rounds in which position k was sent and everything before it was accepted.
        verify_lens, accepted_lens: histograms [G + 1] of verify_len and of num_accepted.
        emitted_tokens: tokens that reached the user; less than the accepted length where a stop cut the round.
    """

    block_size: int
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    verify_lens: list[int] = field(default_factory=list)
    accepted_lens: list[int] = field(default_factory=list)
    emitted_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("drafted", "verified", "reached", "accepted"):
            setattr(self, name, getattr(self, name) or [0] * self.block_size)
        for name in ("verify_lens", "accepted_lens"):
            setattr(self, name, getattr(self, name) or [0] * (self.block_size + 1))

    def record(
        self,
        verify_len: int,
        num_accepted: int,
        *,
        num_drafted: int | None = None,
        num_emitted: int | None = None,
    ) -> None:
        """Add one round of one request.

        Args:
            verify_len: drafts that went to the target, 0 for plain decoding.
            num_accepted: accepted drafts.
            num_drafted: drafts that were proposed; default the block size where any was verified, else 0.
            num_emitted: tokens that reached the user; default num_accepted + 1.
        Raises:
            ValueError: not 0 <= num_accepted <= verify_len <= num_drafted <= block_size.
        """
        if num_drafted is None:
            num_drafted = self.block_size if verify_len else 0
        if not 0 <= num_accepted <= verify_len <= num_drafted <= self.block_size:
            raise ValueError(
                f"num_accepted {num_accepted}, verify_len {verify_len}, num_drafted {num_drafted} and block size "
                f"{self.block_size} must not decrease in this order"
            )
        for k in range(num_drafted):
            self.drafted[k] += 1
            self.verified[k] += k < verify_len
            self.reached[k] += k < verify_len and k <= num_accepted
            self.accepted[k] += k < num_accepted
        self.verify_lens[verify_len] += 1
        self.accepted_lens[num_accepted] += 1
        self.emitted_tokens += num_accepted + 1 if num_emitted is None else num_emitted

    def merge(self, other: AcceptanceStatistics) -> None:
        """Add the counts of another part of the run.

        Raises:
            ValueError: the block sizes differ.
        """
        if other.block_size != self.block_size:
            raise ValueError(f"block sizes {self.block_size} and {other.block_size} cannot be merged")
        for name in ("drafted", "verified", "reached", "accepted", "verify_lens", "accepted_lens"):
            summed = [a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)]
            setattr(self, name, summed)
        self.emitted_tokens += other.emitted_tokens

    @property
    def rounds(self) -> int:
        """Rounds of all requests, those without drafts included."""
        return sum(self.verify_lens)

    @property
    def num_accepted(self) -> int:
        """Accepted drafts in all."""
        return sum(self.accepted)

    @property
    def num_verified(self) -> int:
        """Drafts sent to the target in all."""
        return sum(self.verified)

    @property
    def num_drafted(self) -> int:
        """Drafts proposed in all."""
        return sum(self.drafted)

    @property
    def target_rows(self) -> int:
        """Rows of the target pass: anchors and verified drafts."""
        return self.rounds + self.num_verified

    def accepted_len(self) -> Estimate:
        """Mean accepted length (tau, bonus counted) over all rounds, with the normal interval of a mean."""
        count = self.rounds
        if count == 0:
            return Estimate(None, None, None)
        mean = 1.0 + self.num_accepted / count
        if count == 1:
            return Estimate(mean, None, None)
        squares = sum(n * (k + 1 - mean) ** 2 for k, n in enumerate(self.accepted_lens))
        half = Z_95 * math.sqrt(squares / (count - 1) / count)
        return Estimate(mean, max(mean - half, 1.0), min(mean + half, self.block_size + 1.0))

    def wasted_rows(self) -> Estimate:
        """Share of target rows that were computed for drafts which were then rejected."""
        return wilson(self.num_verified - self.num_accepted, self.target_rows)

    def unconditional(self, k: int) -> Estimate:
        """Share of drafted rounds in which draft position k (from 1) was accepted."""
        return wilson(self.accepted[k - 1], self.drafted[k - 1])

    def conditional(self, k: int) -> Estimate:
        """Share of rounds with 1..k-1 accepted in which k was accepted too; unverified counts as not accepted."""
        return wilson(self.accepted[k - 1], self.drafted[0] if k == 1 else self.accepted[k - 2])

    def accepted_of_verified(self, k: int) -> Estimate:
        """Share accepted where position k was verified after an accepted prefix; says nothing about abstentions."""
        return wilson(self.accepted[k - 1], self.reached[k - 1])

    def to_dict(self) -> dict[str, Any]:
        """Counts, rates and intervals for JSON; `from_dict` reads the counts back."""
        positions = range(1, self.block_size + 1)
        return {
            "block_size": self.block_size,
            "rounds": self.rounds,
            "emitted_tokens": self.emitted_tokens,
            "target_rows": self.target_rows,
            "accepted_len": self.accepted_len().to_dict(),
            "wasted_rows": self.wasted_rows().to_dict(),
            "unconditional": [self.unconditional(k).to_dict() for k in positions],
            "conditional": [self.conditional(k).to_dict() for k in positions],
            "accepted_of_verified": [self.accepted_of_verified(k).to_dict() for k in positions],
            "drafted": list(self.drafted),
            "verified": list(self.verified),
            "reached": list(self.reached),
            "accepted": list(self.accepted),
            "verify_lens": list(self.verify_lens),
            "accepted_lens": list(self.accepted_lens),
        }

    @classmethod
    def from_dict(cls, counts: Mapping[str, Any]) -> AcceptanceStatistics:
        """Rebuild from `to_dict`; rates are computed anew."""
        names = ("drafted", "verified", "reached", "accepted", "verify_lens", "accepted_lens")
        lists = {name: list(counts[name]) for name in names}
        return cls(block_size=counts["block_size"], emitted_tokens=counts["emitted_tokens"], **lists)

    def table(self) -> str:
        """Plain text for people: the headline, then one line per draft position."""
        lines = [
            f"accepted length {_show(self.accepted_len())} of {self.block_size + 1} over {self.rounds} rounds, "
            f"{self.emitted_tokens} tokens",
            f"wasted rows {_show(self.wasted_rows(), percent=True)} of {self.target_rows}",
            f"{'position':>8}  {'accepted':>21}  {'after prefix':>21}  {'of verified':>21}  {'sent':>7}  {'len':>7}",
        ]
        for k in range(1, self.block_size + 1):
            rates = (self.unconditional(k), self.conditional(k), self.accepted_of_verified(k))
            cells = "  ".join(f"{_show(rate, percent=True):>21}" for rate in rates)
            lines.append(f"{k:>8}  {cells}  {self.verified[k - 1]:>7}  {self.verify_lens[k]:>7}")
        return "\n".join(lines)


def _show(estimate: Estimate, percent: bool = False) -> str:
    """A value with its interval, or a dash where there is none."""
    if estimate.value is None:
        return "-"
    scale, digits, unit = (100.0, 1, " %") if percent else (1.0, 2, "")
    text = f"{estimate.value * scale:.{digits}f}{unit}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{estimate.low * scale:.{digits}f}, {estimate.high * scale:.{digits}f}]"
