"""Cuts a failing episode down: fewer arrivals, fewer disturbances, as long as it still fails."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from dspark.validate.lifecycle.episodes import Episode

Fails = Callable[[Episode], bool]


def kept_arrivals(episode: Episode, fails: Fails, seconds: float) -> tuple[int, ...]:
    """Arrivals that are enough for the failure: one after the other is left out, and stays out if it is not needed.

    Args:
        episode: fails.
        fails: plays an episode.
        seconds: stop trying after this long.
    Returns:
        places in `episode.arrivals`.
    """
    until = time.monotonic() + seconds
    kept = list(range(len(episode.arrivals)))
    for place in list(reversed(kept)):
        if time.monotonic() > until or len(kept) == 1:
            break
        fewer = [other for other in kept if other != place]
        if fails(episode.only(fewer)):
            kept = fewer
    return tuple(kept)


def calmed(episode: Episode, fails: Fails, seconds: float) -> Episode:
    """The episode without those disturbances that the failure does not need; for reading, it has no number."""
    until = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for calmer in _calmer(episode):
            if time.monotonic() > until:
                return episode
            if fails(calmer):
                episode, is_smaller = calmer, True
                break
    return episode


def _calmer(episode: Episode) -> Iterator[Episode]:
    """The episode with one disturbance less, in every way."""
    if episode.clear_cache_at:
        yield replace(episode, clear_cache_at=())
    for place, arrival in enumerate(episode.arrivals):
        for fewer in (
            replace(arrival, abort_after=None),
            replace(arrival, preempt_after=arrival.preempt_after[1:]),
            replace(arrival, priority=0),
        ):
            if fewer != arrival:
                arrivals = (*episode.arrivals[:place], fewer, *episode.arrivals[place + 1 :])
                yield replace(episode, arrivals=arrivals)
