"""Random episodes: what one engine goes through, as data that a seed gives and a failure can be cut down from."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dspark.config.errors import DSparkError
from dspark.scheduler.plan import RequestId
from dspark.validate.lifecycle.catalogue import Catalogue
from dspark.validate.lifecycle.driver import MAX_STEPS, Driver
from dspark.validate.lifecycle.settings import EngineSettings
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish

# Drafting a request alone costs more than decoding it alone, so it is done for one in so many entries.
_DRAFTS_OF = 4
# Share of the episodes in which requests grow into each other's pages.
_CROWDED = 0.2


@dataclass(frozen=True)
class Arrival:
    """A request, or several samples of one prompt, and what happens to it. Times are engine steps.

    Attributes:
        entry: its number in the catalogue.
        step: when it arrives, from the start of the episode.
        priority: see the scheduler.
        abort_after, preempt_after: steps after its arrival, None or empty for never.
    """

    entry: int
    step: int
    priority: int = 0
    abort_after: int | None = None
    preempt_after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One engine and what it goes through.

    Attributes:
        number: gives the episode again, with the seed.
        arrivals: by time.
        clear_cache_at: steps at which cached prefixes are dropped.
    """

    number: int
    settings: EngineSettings
    arrivals: tuple[Arrival, ...]
    clear_cache_at: tuple[int, ...] = ()

    def only(self, kept: Iterable[int]) -> "Episode":
        """The same episode with some of its arrivals.

        Raises:
            DSparkError: it has not so many.
        """
        places = tuple(kept)
        if places and max(places) >= len(self.arrivals):
            raise DSparkError(f"episode {self.number} has requests 0 to {len(self.arrivals) - 1}, not {max(places)}")
        return replace(self, arrivals=tuple(self.arrivals[place] for place in places))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Played:
    """What an episode came to.

    Attributes:
        num_steps: engine steps.
        events: see `Ledger`.
        failure: what went wrong, or None.
        failed_at: engine step of the failure.
    """

    num_steps: int
    events: Counter[str]
    failure: str | None = None
    failed_at: int | None = None


def make_episode(catalogue: Catalogue, number: int) -> Episode:
    """The episode of a number: engine settings, arrivals and disturbances, all drawn from (seed, number).

    Later episodes draw from more requests, so that a long run sees new ones and most of its time is not spent on
    decoding them alone.
    """
    rng = random.Random(f"{catalogue.seed}/{catalogue.subject.name}/episode {number}")
    known = range(24 + number // 2)
    growing = [entry for entry in rng.sample(known, 24) if _grows(catalogue, entry)] if rng.random() < _CROWDED else []
    arrivals = _arrivals(rng, growing or known)
    wishes = [wish for arrival in arrivals for wish in catalogue.entry(arrival.entry)]
    last = arrivals[-1].step + 20
    clear_at = tuple(sorted(rng.randrange(last) for _ in range(rng.choice([0, 0, 0, 1, 2]))))
    settings = _settings(rng, catalogue.subject, wishes)
    if growing:
        # Two or three requests are let in, each with its page, and one page is missing when all of them grow.
        settings = replace(settings, max_num_seqs=4, max_num_batched_tokens=200, max_num_pages=rng.choice([3, 5]))
    return Episode(number, settings, arrivals, clear_at)


def _grows(catalogue: Catalogue, entry: int) -> bool:
    """Whether a request starts within a page and may grow into the next one, and no further."""
    page = catalogue.subject.page_tokens
    ends = [(len(wish.prompt_ids), len(wish.prompt_ids) + wish.params.max_tokens) for wish in catalogue.entry(entry)]
    return all(start <= page < end <= 2 * page for start, end in ends)


def _arrivals(rng: random.Random, entries: Sequence[int]) -> tuple[Arrival, ...]:
    arrivals: list[Arrival] = []
    step, spread = 0, rng.choice([1, 4, 10])
    for _ in range(rng.randint(2, 12)):
        # Requests that come again are warm the second time.
        is_repeated = bool(arrivals) and rng.random() < 0.4
        step += rng.randrange(spread)
        preempted = sorted(rng.randrange(1, 30) for _ in range(rng.choice([0, 0, 1, 1, 2, 4])))
        arrivals.append(
            Arrival(
                entry=rng.choice(arrivals).entry if is_repeated else rng.choice(entries),
                step=step,
                priority=rng.choice([0, 0, 0, -1, 2]),
                abort_after=rng.randrange(25) if rng.random() < 0.15 else None,
                preempt_after=tuple(preempted),
            )
        )
    return tuple(arrivals)


def _settings(rng: random.Random, subject: Subject, wishes: list[Wish]) -> EngineSettings:
    """An engine in which each request fits, and all together often do not."""
    width = rng.choice([0, *range(1, subject.block_size + 1), subject.block_size, subject.block_size])
    max_num_seqs = rng.randint(1, 5)
    lengths = [min(len(wish.prompt_ids) + wish.params.max_tokens, subject.max_model_len) for wish in wishes]
    least = -(-max(lengths) // subject.page_tokens)
    return EngineSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * (1 + width) + rng.choice([0, 4, 20, 60, 60, 200]),
        max_num_pages=least + rng.choice([0, 1, 2, 3, 4, 16, 32]),
        num_speculative_tokens=width,
        threshold=rng.choice([None, None, 0.1, 0.3, 0.6]),
        lengths_seed=rng.choice([None, None, rng.randrange(1000)]),
        health_window=rng.choice([None, None, 4, 16]),
        enable_prefix_caching=rng.random() < 0.85,
        prefix_cache_interval=rng.choice([None, 1, 2 * subject.page_tokens]),
        prefix_cache_bytes=rng.choice([1, 2**14, 2**26, 2**26, 2**26]),
        runs_ahead=rng.random() < 0.5,
    )


def play(catalogue: Catalogue, episode: Episode) -> Played:
    """Let an engine go through an episode; whatever goes wrong in it is returned, not raised."""
    player = _Player(catalogue, episode)
    try:
        player.run()
    except Exception as error:  # a crash of the engine is a finding like any other
        words = f"{type(error).__name__}: {error}" if str(error) else repr(error)
        return Played(player.driver.num_steps, player.driver.events, words, player.driver.num_steps)
    return Played(player.driver.num_steps, player.driver.events)


class _Player:
    """One episode on its way."""

    def __init__(self, catalogue: Catalogue, episode: Episode) -> None:
        self.catalogue = catalogue
        self.episode = episode
        self.driver = Driver(catalogue.subject, episode.settings)
        self.owners: dict[RequestId, int] = {}  # which arrival a name belongs to now; names are used again

    def run(self) -> None:
        """Step until the last arrival has come and everything has ended."""
        last = self.episode.arrivals[-1].step if self.episode.arrivals else 0
        for step in range(MAX_STEPS):
            self._disturb(step)
            if self.driver.loop.has_work:
                self.driver.step()
            elif step > last:
                break
        else:
            raise AssertionError(f"the episode does not end within {MAX_STEPS} steps")
        self.driver.finish()

    def _disturb(self, step: int) -> None:
        """Everything that happens between two steps."""
        if step in self.episode.clear_cache_at:
            self.driver.clear_cache()
        for number, arrival in enumerate(self.episode.arrivals):
            age = step - arrival.step
            if age == 0:
                self._arrive(number, arrival)
            if age in arrival.preempt_after:
                for name in filter(self.driver.is_running, self._names_of(number)):
                    self.driver.preempt(name)
            if age == arrival.abort_after:
                names = self._names_of(number)
                for name in names[: (len(names) + 1) // 2]:  # of several samples some go on
                    self.driver.abort(name)

    def _names_of(self, number: int) -> list[RequestId]:
        """Requests of an arrival that have not ended."""
        return [name for name, owner in self.owners.items() if owner == number and name in self.driver.ledger.live]

    def _arrive(self, number: int, arrival: Arrival) -> None:
        wishes = self.catalogue.entry(arrival.entry)
        names = self._free_names(number, len(wishes))
        self.owners |= dict.fromkeys(names, number)
        compares_drafts = arrival.entry % _DRAFTS_OF == 0
        if len(wishes) > 1:
            self.driver.submit_samples(names, wishes, arrival.priority, compares_drafts=compares_drafts)
        else:
            self.driver.submit(names[0], wishes[0], arrival.priority, compares_drafts=compares_drafts)

    def _free_names(self, number: int, count: int) -> list[RequestId]:
        """Names of ended requests first: what is late for one of those must not reach its successor."""
        ended = [name for name in self.owners if name not in self.driver.ledger.live]
        return [*ended, *(f"{number}.{place}" for place in range(count))][:count]
