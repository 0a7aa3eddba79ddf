"""One run of the validator: scenarios on every model, then random episodes in turn until the budget is spent."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dspark.engine.machine import describe_machine
from dspark.validate.lifecycle.catalogue import Catalogue
from dspark.validate.lifecycle.episodes import Episode, Played, make_episode, play
from dspark.validate.lifecycle.report import EpisodeCounts, EpisodeFailure, LifecycleReport
from dspark.validate.lifecycle.scenarios.registry import run_scenario
from dspark.validate.lifecycle.shrink import calmed, kept_arrivals
from dspark.validate.lifecycle.subject import Subject

# Episodes take turns: so many of this many are played on the model that was asked for, the others on the tiny ones.
_TURNS, _GIVEN_TURNS = 16, 1
_SHRINK_SECONDS = 60.0
# After so many failures nothing new is learnt.
_MOST_FAILURES = 5

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Budget:
    """When a run of episodes ends: after so many episodes, or after so many seconds; the other is None."""

    episodes: int | None = None
    seconds: float | None = None

    def numbers(self, first: int = 0) -> Iterator[int]:
        """Episode numbers until the budget is spent."""
        until = None if self.seconds is None else time.monotonic() + self.seconds
        number = first
        while (self.episodes is None or number < first + self.episodes) and (until is None or time.monotonic() < until):
            yield number
            number += 1


class Run:
    """Models, their random requests, and what has been found about them so far.

    Args:
        given: the model that was asked for.
        tiny: small models for volume; may be empty.
        seed: of everything random.
        max_prompt: tokens of a random prompt at most, by subject name.
        model_flag: how a replay command names the model, e.g. "--model DIR"; empty for the embedded one.
        on_progress: called with what is going on, and the engine steps of random episodes so far.
    """

    def __init__(
        self,
        given: Subject,
        tiny: Sequence[Subject],
        seed: int,
        max_prompt: int,
        model_flag: Sequence[str] = (),
        on_progress: Progress = lambda task, steps: None,
    ) -> None:
        self.given, self.tiny = given, list(tiny)
        self.seed = seed
        self.model_flag = tuple(model_flag)
        self.on_progress = on_progress
        self.report = LifecycleReport(given.name, seed, describe_machine(given.device))
        self._catalogues = {
            subject.name: Catalogue(subject, seed, max_prompt if subject is given else subject.max_model_len)
            for subject in (given, *tiny)
        }
        self._counts = {subject.name: EpisodeCounts(subject.name) for subject in (*tiny, given)}

    def scenarios(self, names: Sequence[str]) -> None:
        """Play named scenarios on every model."""
        for subject in (*self.tiny, self.given):
            for name in names:
                self.on_progress(f"{name} on {subject.name}", self.report.num_steps)
                self.report.scenarios.append(run_scenario(name, subject))

    def episodes(self, budget: Budget) -> None:
        """Play random episodes; a failure is cut down and the run goes on, up to a number of failures."""
        for number in budget.numbers():
            self.on_progress(f"episode {number}", sum(counts.num_steps for counts in self._counts.values()))
            self.episode(number)
            if len(self.report.failures) >= _MOST_FAILURES:
                break
        self._close()

    def replay(self, number: int, arrivals: Sequence[int] | None) -> None:
        """Play one episode again, with some of its arrivals or all."""
        self.episode(number, arrivals)
        self._close()

    def _close(self) -> None:
        self.report.episodes = [counts for counts in self._counts.values() if counts.num_episodes]

    def episode(self, number: int, arrivals: Sequence[int] | None = None) -> None:
        """Play one episode and count it."""
        began = time.perf_counter()
        subject = self._subject_of(number)
        catalogue, counts = self._catalogues[subject.name], self._counts[subject.name]
        episode = make_episode(catalogue, number)
        played = play(catalogue, episode if arrivals is None else episode.only(arrivals))
        if played.failure is not None:
            self.report.failures.append(self._failure(catalogue, episode, played, arrivals))
        counts.num_episodes += 1
        counts.num_steps += played.num_steps
        counts.events += played.events
        counts.num_answers, counts.num_oracle_steps = subject.oracle.num_answers, subject.oracle.num_steps
        counts.seconds += time.perf_counter() - began

    def _subject_of(self, number: int) -> Subject:
        """Models take turns by episode number, so that a number is all that a replay needs."""
        if not self.tiny or number % _TURNS >= _TURNS - _GIVEN_TURNS:
            return self.given
        return self.tiny[number % len(self.tiny)]

    def _failure(
        self, catalogue: Catalogue, episode: Episode, played: Played, arrivals: Sequence[int] | None
    ) -> EpisodeFailure:
        """Cut a failing episode down, within a time."""

        def fails(candidate: Episode) -> bool:
            return play(catalogue, candidate).failure is not None

        kept = tuple(arrivals) if arrivals is not None else kept_arrivals(episode, fails, _SHRINK_SECONDS)
        smallest = calmed(episode.only(kept), fails, _SHRINK_SECONDS)
        flags = ["dspark", "validate", "lifecycle", *self.model_flag, "--seed", str(self.seed)]
        flags += ["--episode", str(episode.number), "--arrivals", ",".join(map(str, kept))]
        wishes = [[wish.as_json() for wish in catalogue.entry(arrival.entry)] for arrival in smallest.arrivals]
        return EpisodeFailure(
            subject=catalogue.subject.name,
            episode=episode.number,
            step=played.failed_at or 0,
            message=played.failure or "",
            arrivals=kept,
            replay=shlex.join(flags),
            smallest={**smallest.as_json(), "requests": wishes},
        )
