"""Rounds as a benchmark keeps them, and figures of many: acceptance with intervals, and the worth of the confidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.bench.bootstrap import Interval, mean_interval
from dspark.bench.calibration import area_under_curve, expected_calibration_error
from dspark.bench.generate import Item
from dspark.engine.observer import RoundRecord
from dspark.ops.elementwise import sigmoid
from dspark.speculative.statistics import AcceptanceStatistics, Estimate


@dataclass(frozen=True)
class DecidedRound:
    """One round of one prompt.

    Attributes:
        num_drafted, verify_len: drafts proposed and verified.
        num_accepted: drafts that were accepted and emitted.
        num_known: draft positions whose fate is known: fewer than verify_len where the output stopped inside the block.
        confidence: [num_drafted] c_k; empty from a drafter without a confidence head.
    """

    num_drafted: int
    verify_len: int
    num_accepted: int
    num_known: int
    confidence: tuple[float, ...]


@dataclass(frozen=True)
class PromptRounds:
    """The rounds of one prompt that count, and the tokens that it emitted."""

    item: Item
    token_ids: tuple[int, ...]
    rounds: tuple[DecidedRound, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """Accepted tokens, the bonus of each round included, and rounds."""
        return sum(one.num_accepted + 1 for one in self.rounds), len(self.rounds)


@dataclass(frozen=True)
class ConfidenceQuality:
    """What the confidence is worth at one draft position, or over all.

    Attributes:
        num_confidence: rounds in which everything before the position was accepted and its own fate is known.
        confidence_ece: calibration error of c_k over those rounds.
        auc: how well c_k ranks accepted above rejected drafts over those rounds.
        num_survival: rounds in which the fate of the prefix is known.
        survival_ece: calibration error of a_k = c_1 ... c_k against "drafts 1..k were all accepted".
    """

    num_confidence: int
    confidence_ece: float | None
    auc: float | None
    num_survival: int
    survival_ece: float | None

    def as_json(self) -> dict[str, float | None]:
        """For programs, four digits."""
        return dict(zip(vars(self), _rounded(*vars(self).values()), strict=True))


@dataclass(frozen=True)
class AcceptanceRow:
    """The figures of one domain, or of all.

    Attributes:
        num_tokens: emitted tokens, those of uncounted rounds included.
        accepted_len: mean accepted length, None without a round.
        accepted_len_interval: 95 %, prompts resampled; None with fewer than two prompts.
        statistics: counts and rates by draft position.
        quality: [G] by draft position, then one entry over all positions; empty without confidences.
    """

    name: str
    num_prompts: int
    num_tokens: int
    accepted_len: float | None
    accepted_len_interval: Interval | None
    statistics: AcceptanceStatistics
    quality: tuple[ConfidenceQuality, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs; shares and errors to four digits, as [value, low, high] where they have an interval."""
        statistics, positions = self.statistics, range(1, self.statistics.block_size + 1)
        return {
            "name": self.name,
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
            "rounds": statistics.rounds,
            "accepted_len": _rounded(self.accepted_len, *(self.accepted_len_interval or (None, None))),
            "drafted": statistics.drafted,
            "verified": statistics.verified,
            "accepted": statistics.accepted,
            "accepted_share": [_triple(statistics.unconditional(k)) for k in positions],
            "accepted_after_prefix": [_triple(statistics.conditional(k)) for k in positions],
            "confidence": [quality.as_json() for quality in self.quality],
        }


def _triple(estimate: Estimate) -> list[float | None]:
    return _rounded(estimate.value, estimate.low, estimate.high)


def _rounded(*values: float | None) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


def keep_round(record: RoundRecord) -> DecidedRound:
    """Cut a round at the token that ended the output: drafts behind it were never put to use, so nothing is known."""
    is_cut = record.num_emitted <= record.num_accepted
    confidence: tuple[float, ...] = ()
    if record.confidence_logits is not None:
        confidence = tuple(sigmoid(record.confidence_logits.detach().float()).tolist())
    return DecidedRound(
        num_drafted=len(record.draft_ids),
        verify_len=record.verify_len,
        num_accepted=min(record.num_accepted, record.num_emitted),
        num_known=record.num_emitted if is_cut else record.verify_len,
        confidence=confidence,
    )


def summarise_rounds(name: str, prompts: Sequence[PromptRounds], block_size: int) -> AcceptanceRow:
    """Pool the rounds of prompts; a prompt with many rounds weighs more than one with few."""
    statistics = AcceptanceStatistics(block_size)
    rounds = [one for prompt in prompts for one in prompt.rounds]
    for one in rounds:
        statistics.record(one.verify_len, one.num_accepted, num_drafted=one.num_drafted)
    return AcceptanceRow(
        name=name,
        num_prompts=len(prompts),
        num_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        accepted_len=statistics.accepted_len().value,
        accepted_len_interval=mean_interval([prompt.counts for prompt in prompts]),
        statistics=statistics,
        quality=judge_confidence(rounds, block_size),
    )


def judge_confidence(rounds: Sequence[DecidedRound], block_size: int) -> tuple[ConfidenceQuality, ...]:
    """Quality at draft positions 1..block_size and over all of them; empty where no round has confidences."""
    judged = [one for one in rounds if one.confidence]
    if not judged:
        return ()
    positions = range(1, block_size + 1)
    conditional = [confidence_pairs(judged, k) for k in positions]
    cumulative = [survival_pairs(judged, k) for k in positions]
    conditional.append(np.concatenate(conditional))
    cumulative.append(np.concatenate(cumulative))
    return tuple(_quality(c, a) for c, a in zip(conditional, cumulative, strict=True))


def confidence_pairs(rounds: Sequence[DecidedRound], k: int) -> NDArray[np.float64]:
    """[N, 2] c_k and whether draft k was accepted, of the rounds in which drafts 1..k-1 were."""
    pairs = [
        (one.confidence[k - 1], one.num_accepted >= k) for one in rounds if k - 1 <= one.num_accepted and _knows(one, k)
    ]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def survival_pairs(rounds: Sequence[DecidedRound], k: int) -> NDArray[np.float64]:
    """[N, 2] a_k and whether drafts 1..k were all accepted."""
    pairs = [(np.prod(one.confidence[:k]), one.num_accepted >= k) for one in rounds if _knows(one, k)]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _knows(one: DecidedRound, k: int) -> bool:
    return k <= one.num_known


def _quality(conditional: NDArray[np.float64], cumulative: NDArray[np.float64]) -> ConfidenceQuality:
    return ConfidenceQuality(
        num_confidence=len(conditional),
        confidence_ece=expected_calibration_error(conditional[:, 0], conditional[:, 1]),
        auc=area_under_curve(conditional[:, 0], conditional[:, 1]),
        num_survival=len(cumulative),
        survival_ece=expected_calibration_error(cumulative[:, 0], cumulative[:, 1]),
    )
