"""Draft health: drafting stops while it gains too little, and is tried again later. Counts rounds, never seconds.

Which rounds are drafted depends on the acceptance of earlier rounds only, never on the drafts of a round to come, so
the ratio test keeps its distribution; keyed requests keep their tokens whatever happens here.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from enum import Enum

from dspark.config.speculative import DraftHealthConfig

log = logging.getLogger("dspark.engine")


class HealthState(Enum):
    """What an engine does about drafts."""

    DRAFTING = "drafting"
    RESTING = "resting"
    PROBING = "probing"


@dataclass(slots=True)
class HealthCounts:
    """Since the start.

    Attributes:
        fallbacks: how often drafting stopped because it gained too little.
        probes: trials begun.
        recoveries: trials after which drafting went on.
        rounds_off: rounds without drafts because of that.
    """

    fallbacks: int = 0
    probes: int = 0
    recoveries: int = 0
    rounds_off: int = 0


class DraftHealth:
    """Decides whether rounds are drafted, from what the rounds before them gained.

    A round that drafted counts whatever became of its drafts; one whose drafts were not worth verifying has an accepted
    length of 1. After a change, rounds that were begun before it are counted for nothing.

    Args:
        rules: None drafts always.
    Attributes:
        state, counts: as they are now.
        accepted_len: mean of the rounds that the last change was decided on; 0 before the first.
    """

    def __init__(self, rules: DraftHealthConfig | None) -> None:
        self.rules = rules
        self.state = HealthState.DRAFTING
        self.counts = HealthCounts()
        self.accepted_len = 0.0
        self._recent: deque[int] = deque()
        self._sum = 0
        self._rounds_left = 0
        self._missed = 0.0  # what accepted_len was below

    @property
    def is_drafting(self) -> bool:
        """Whether the next round is drafted."""
        return self.state is not HealthState.RESTING

    @property
    def is_well(self) -> bool:
        """Whether drafting pays, as far as is known; false during a trial."""
        return self.state is HealthState.DRAFTING

    @property
    def reason(self) -> str:
        """Why rounds are not drafted, as the end of "not running because ..."; empty while drafting pays.

        The same from one change of state to the next, so that it can be a label of metrics.
        """
        if self.rules is None or self.is_well:
            return ""
        what = f"the accepted length fell to {self.accepted_len:.2f}, below {self._missed:g}"
        if self.state is HealthState.PROBING:
            return f"{what}; drafting is being tried again"
        return f"{what}; drafting is tried again after {self.rules.probe_after} rounds"

    def observe(self, accepted_len: int, *, was_drafted: bool) -> None:
        """Count one round of one request.

        Args:
            accepted_len: accepted drafts and the bonus.
            was_drafted: whether a block was proposed for it.
        """
        if self.rules is None:
            return
        match self.state:
            case HealthState.DRAFTING if was_drafted:
                self._count(accepted_len, self.rules.window)
                if len(self._recent) == self.rules.window and self._mean() < self.rules.floor:
                    self._fall_back(self.rules)
            case HealthState.PROBING if was_drafted:
                self._count(accepted_len, self.rules.probe_rounds)
                if len(self._recent) == self.rules.probe_rounds:
                    self._judge_probe(self.rules)
            case HealthState.RESTING if not was_drafted:
                self.counts.rounds_off += 1
                self._rounds_left -= 1
                if self._rounds_left == 0:
                    self._probe(self.rules)

    def _count(self, accepted_len: int, size: int) -> None:
        self._recent.append(accepted_len)
        self._sum += accepted_len
        if len(self._recent) > size:
            self._sum -= self._recent.popleft()

    def _mean(self) -> float:
        return self._sum / len(self._recent)

    def _enter(self, state: HealthState) -> None:
        self.state = state
        self._recent.clear()
        self._sum = 0

    def _fall_back(self, rules: DraftHealthConfig) -> None:
        self.counts.fallbacks += 1
        self._rest(rules, rules.floor)
        log.warning("speculation is not running because %s", self.reason)

    def _rest(self, rules: DraftHealthConfig, missed: float) -> None:
        self.accepted_len, self._missed = self._mean(), missed
        self._rounds_left = rules.probe_after
        self._enter(HealthState.RESTING)

    def _probe(self, rules: DraftHealthConfig) -> None:
        self.counts.probes += 1
        self._enter(HealthState.PROBING)
        log.debug("speculation is tried again for %d rounds", rules.probe_rounds)

    def _judge_probe(self, rules: DraftHealthConfig) -> None:
        if self._mean() < rules.recovery:
            self._rest(rules, rules.recovery)
            log.debug("speculation is still not running because %s", self.reason)
            return
        self.accepted_len = self._mean()
        self.counts.recoveries += 1
        self._enter(HealthState.DRAFTING)
        log.info("speculation is running again: the accepted length is %.2f", self.accepted_len)
