"""Drives the serving loop with random arrivals, priorities, samples, aborts and preemptions over too few pages."""

import random
from collections.abc import Sequence
from typing import Any

from dspark.engine.core import Speculation
from dspark.engine.graphs import GraphPlan
from dspark.engine.request import Emission
from support.alone import Outcome
from support.engines import tiny_loop
from support.schedules import MAX_STEPS, Wish, poison
from support.tiny_models import BLOCK


class LoopDrive:
    """One loop under one run of chance; every request that ends is compared with itself alone.

    Args:
        rng: makes every choice.
        wishes: requests; each may be made several times, as a repeated prompt or as samples.
    """

    def __init__(
        self, model_key: tuple[Any, ...], rng: random.Random, wishes: Sequence[Wish], graphs: GraphPlan | None = None
    ) -> None:
        self.rng = rng
        self.loop = tiny_loop(
            *model_key,
            speculation=rng.choice([None, None, Speculation()]),
            num_slots=rng.randint(1, 4),
            num_pages=rng.randint(7, 24),
            max_rows=rng.randint(4, 40),
            interval_pages=rng.choice([1, 2, 3]),
            image_bytes=rng.choice([1, 20_000, 2**24]),
            reuses_prefixes=rng.random() < 0.85,
            graphs=graphs,
        )
        self.arrivals = [wish for wish in wishes for _ in range(rng.choice([1, 1, 2]))]
        rng.shuffle(self.arrivals)
        self.wishes: dict[Any, Wish] = {}
        self.texts: dict[Any, str] = {}
        self.emitted: dict[Any, list[Emission]] = {}
        self.num_preemptions = 0

    def run(self) -> None:
        """Step until all have ended."""
        for _ in range(4 * MAX_STEPS):
            if not self.arrivals and not self.loop.has_work:
                break
            self._disturb()
            for emission in self.loop.step():
                self._take(emission)
            self.loop.check_integrity()
        else:
            raise AssertionError("the schedule does not end")
        self.loop.clear_cache()
        self.loop.check_integrity()
        pages = self.loop.engine.state.pages
        assert pages.num_free == pages.num_pages, "pages are left over"

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _disturb(self) -> None:
        while self.arrivals and (not self.loop.has_work or self._chance(0.4)):
            self._arrive(self.arrivals.pop())
        running = self.loop.scheduler.running
        if running and self._chance(0.1):
            self.loop.preempt(self.rng.choice(running))
        if self.wishes and self._chance(0.05):
            victim = self.rng.choice(list(self.wishes))
            assert self.loop.abort(victim)
            del self.wishes[victim]
        if self._chance(0.05):
            self.loop.clear_cache()
        if self._chance(0.3):
            poison(self.loop.engine.state)
        self.loop.check_integrity()

    def _arrive(self, wish: Wish) -> None:
        count = self.rng.choice([1, 1, 1, 3])
        ids = [len(self.emitted) + number for number in range(count)]
        for request_id in ids:
            self.wishes[request_id], self.texts[request_id], self.emitted[request_id] = wish, "", []
        self.loop.add_samples(ids, wish.prompt, [wish.params] * count, priority=self.rng.choice([0, 0, 1]))

    def _take(self, emission: Emission) -> None:
        request_id = emission.request_id
        self.emitted[request_id].append(emission)
        assert len(emission.token_ids) <= 1 + BLOCK
        if emission.finish_reason is None:
            return
        outcome = self.wishes.pop(request_id).outcome
        if outcome is not None:
            assert outcome_of(self.emitted[request_id]) == outcome


def outcome_of(emissions: Sequence[Emission]) -> Outcome:
    """What a user saw of a request."""
    return Outcome(
        tuple(token for emission in emissions for token in emission.token_ids),
        "".join(emission.text for emission in emissions),
        str(emissions[-1].finish_reason),
        tuple(found for emission in emissions for found in emission.logprobs),
        emissions[0].prompt_logprobs,
    )
