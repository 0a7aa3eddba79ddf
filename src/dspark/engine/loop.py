"""The engine that serves many requests: continuous batching, prefix cache, preemption and samples around `Engine.step`.

What it decides never shows in a request's tokens: admission, a hit, a preemption and a fork all lead to the same rows.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.engine.core import Engine
from dspark.engine.memory import MemoryPlan
from dspark.engine.request import Emission, Request
from dspark.engine.run_ahead import run_ahead_of
from dspark.engine.status import LoopStatus
from dspark.scheduler.plan import PlannedSpan, RequestId, RequestNeeds, StepPlan
from dspark.scheduler.scheduler import Place, Scheduler
from dspark.state.model_state import RequestState
from dspark.state.prefix_cache import PrefixCache, PrefixChain


@dataclass(eq=False)
class LiveRequest:
    """A request and its life in the loop.

    Attributes:
        place: in the order of precedence.
        chain: digests of its blocks.
        branch_at: where its prompt parts from the prefixes that are known; an image is kept there. 0 for nowhere.
        samples: further samples of the prompt, which wait for the end of its prefill.
        is_sample: it waited like that, so its prompt is cached for it whatever the configuration says.
        has_started: it held state before.
    """

    request: Request
    place: Place
    chain: PrefixChain
    branch_at: int = 0
    samples: list["LiveRequest"] = field(default_factory=list)
    is_sample: bool = False
    has_started: bool = False


class EngineLoop:
    """Requests in at any moment between steps, emissions out of each step.

    Args:
        engine: runs the passes.
        scheduler: decides who runs.
        cache: holds prefixes.
        max_model_len: tokens of a request at most.
        image_interval: tokens between two images of a long prompt, a multiple of the page.
        reuses_prefixes: whether requests continue prefixes of others.
        memory: who holds what, where somebody counted.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        cache: PrefixCache,
        max_model_len: int,
        image_interval: int,
        *,
        reuses_prefixes: bool = True,
        memory: MemoryPlan | None = None,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.cache = cache
        self.max_model_len = max_model_len
        self.image_interval = image_interval
        self.reuses_prefixes = reuses_prefixes
        self.memory = memory
        self._state = engine.state
        self._ahead = run_ahead_of(engine, scheduler.max_rows)
        self._live: dict[RequestId, LiveRequest] = {}
        self._arrivals = count()
        self._num_steps = 0
        self._num_preemptions = 0
        self._last_plan = StepPlan(())

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live)

    def add(
        self, request_id: RequestId, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> Request:
        """Queue a request.

        Args:
            priority: the lowest value runs first; among equals the first come.
        Raises:
            ConfigError: it can never run; nothing is held then.
        """
        return self.add_samples([request_id], prompt_ids, [params], priority=priority)[0]

    def add_samples(
        self,
        request_ids: Sequence[RequestId],
        prompt_ids: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
    ) -> list[Request]:
        """Queue samples of one prompt: the first computes it, the others continue from its state.

        Raises:
            ConfigError: one of them can never run, or there is none; none is held then.
        """
        if not request_ids:
            raise ConfigError("there is no sample to run: give at least one set of parameters")
        place = Place(priority, next(self._arrivals))
        added: list[LiveRequest] = []
        try:
            for request_id, own in zip(request_ids, params, strict=True):
                added.append(self._take_in(request_id, prompt_ids, own, place))
                place = Place(priority, next(self._arrivals))
        except BaseException:
            for live in added:
                self.abort(live.request.request_id)
            raise
        first, *others = added
        first.samples = others
        for live in others:
            live.is_sample = True
        self.scheduler.add(first.request.request_id, first.place)
        return [live.request for live in added]

    def _take_in(
        self, request_id: RequestId, prompt_ids: Sequence[int], params: SamplingParams, place: Place
    ) -> LiveRequest:
        request = self.engine.add(request_id, prompt_ids, params, self.max_model_len)
        try:
            self.scheduler.require_fit(request.max_len)
        except BaseException:
            self.engine.remove(request_id)
            raise
        live = LiveRequest(request, place, self.cache.chain())
        self._live[request_id] = live
        return live

    def abort(self, request_id: RequestId) -> bool:
        """End a request wherever it stands; False when it is not there."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        for other in self._live.values():
            if live in other.samples:
                other.samples.remove(live)
        self._release_samples(live)
        self.scheduler.remove(request_id)
        self.engine.remove(request_id)
        return True

    def preempt(self, request_id: RequestId) -> None:
        """Take a running request off; it goes on from its last image when its turn comes again."""
        self.scheduler.preempt(request_id)
        self._set_aside(request_id)

    def step(self) -> list[Emission]:
        """One step: who runs and who stops, one round of the engine, what is kept of it, who has ended."""
        self._admit()
        if self._ahead is not None:
            running = [self._live[request_id].request for request_id in self.scheduler.running]
            if self._ahead.takes(running) and self._find_pages(self._ahead.pages_needed(running)):
                return self._run(running, partial(self._ahead.advance, running))
            if self._ahead.is_flying:
                return self._run(running, self._ahead.drain)
        return self._general_step()

    def _general_step(self) -> list[Emission]:
        """A step that the host plans and reads."""
        schedule = self.scheduler.plan(self._needs_of, self)
        for request_id in schedule.preempted:
            self._set_aside(request_id)
        if not schedule.plan.spans:
            return []
        self._make_room(schedule.plan)
        planned = [self._live[span.request_id].request for span in schedule.plan.spans]
        return self._run(planned, partial(self.engine.step, schedule.plan), schedule.plan)

    def _run(
        self, requests: list[Request], step: Callable[[], list[Emission]], plan: StepPlan | None = None
    ) -> list[Emission]:
        """One round of the engine, what is kept of it, who has ended."""
        before = {request.request_id: request.committed for request in requests}
        emissions = step()
        self._num_steps += 1
        self._last_plan = plan or StepPlan(tuple(PlannedSpan(one.request_id, 1, one.verify_len) for one in emissions))
        for request_id, committed in before.items():
            self._keep_prefixes(self._live[request_id], committed)
        for emission in emissions:
            live = self._live[emission.request_id]
            self._release_samples(live)
            if emission.finish_reason is not None:
                self._end(live)
        return emissions

    def _admit(self) -> None:
        """Start waiting requests in order, while there is room."""
        while (request_id := self.scheduler.next_to_start(self._needs_of, self)) is not None:
            live = self._live[request_id]
            self.cache.make_room(1)  # a prefix that ends inside a page has that page copied
            length = self._reusable_len(live)
            if live.has_started or not length:
                image = self.cache.find(live.chain, live.request.token_ids, length)
            else:
                image = self.cache.take(live.chain, live.request.token_ids, length)
            if image is not None and image.committed % self._state.page_tokens and not self._state.pages.num_free:
                image = None
            self.engine.start(request_id, image)
            if not live.has_started:
                live.request.num_cached_tokens = image.committed if image else 0
                live.branch_at = self._branch(live)
            live.has_started = True

    def _reusable_len(self, live: LiveRequest) -> int:
        """Tokens of a prefix that a request may continue: all but one; no new ones where each row is asked for."""
        request = live.request
        if not (self.reuses_prefixes or live.is_sample or live.has_started):
            return 0
        if request.prompt_logprobs is not None and not request.origins:
            return len(request.prompt_logprobs) - 1
        return len(request.token_ids) - 1

    def _branch(self, live: LiveRequest) -> int:
        """Where the prompt leaves the blocks that others share, if no image lies there yet."""
        if not self.reuses_prefixes:
            return 0
        shared = self.cache.shared_len(live.chain, live.request.token_ids)
        return shared if shared > live.request.num_cached_tokens else 0

    def _needs_of(self, request_id: RequestId) -> RequestNeeds:
        live = self._live[request_id]
        request, state = live.request, self._state_of(request_id)
        num_pending = len(request.token_ids) - state.committed
        return RequestNeeds(
            request_id,
            num_pending,
            request.draft.verify_len if request.draft else 0,
            request.max_len,
            state.committed,
            len(state.pages),
            self._max_chunk(live, state.committed, num_pending) if num_pending > 1 else None,
        )

    def _max_chunk(self, live: LiveRequest, committed: int, num_pending: int) -> int | None:
        """Rows up to the next position that wants an image, unless the image can still be taken after all of them."""
        if not self.reuses_prefixes:
            return None
        stop = (committed // self.image_interval + 1) * self.image_interval
        if committed < live.branch_at < stop:
            stop = live.branch_at
        return None if committed + num_pending - stop <= self._state.max_rewind else stop - committed

    def _keep_prefixes(self, live: LiveRequest, before: int) -> None:
        """Keep images at the positions of this step that others may want to continue from."""
        request, state = live.request, self._state_of(live.request.request_id)
        committed, page = state.committed, self._state.page_tokens
        wanted = []
        if self.reuses_prefixes:
            wanted.append(committed // self.image_interval * self.image_interval)
            wanted.append(live.branch_at)
            if before < request.prompt_len <= committed:
                wanted.append(committed // page * page)
        if live.samples and request.prompt_len <= committed:
            wanted.append(request.prompt_len - 1)
        for position in dict.fromkeys(wanted):
            if max(before, committed - self._state.max_rewind, 1) <= position <= committed:
                self.cache.keep(live.chain, request.token_ids, state, position)

    def _release_samples(self, live: LiveRequest) -> None:
        """Queue the samples that waited for this request; if it ends before its prefill, the next one computes it."""
        if not live.samples:
            return
        if not live.request.origins:
            first, *live.samples = live.samples
            first.samples, live.samples = live.samples, [first]
            first.is_sample = False
        for sample in live.samples:
            self.scheduler.add(sample.request.request_id, sample.place)
        live.samples = []

    def _set_aside(self, request_id: RequestId) -> None:
        """Free the slot and the pages of a request that was stopped; its prefix stays cached while there is room."""
        live = self._live[request_id]
        state = self._state_of(request_id)
        if self.reuses_prefixes and state.committed:
            self.cache.keep(live.chain, live.request.token_ids, state, state.committed)
        self.engine.preempt(request_id)
        self._num_preemptions += 1

    def _end(self, live: LiveRequest) -> None:
        """Free what a finished request holds; all of its final rows stay as a prefix of the next turn."""
        state = self._state_of(live.request.request_id)
        if self.reuses_prefixes:
            self.cache.keep(live.chain, live.request.token_ids, state, state.committed)
        del self._live[live.request.request_id]
        self.scheduler.remove(live.request.request_id)
        self.engine.remove(live.request.request_id)

    def _state_of(self, request_id: RequestId) -> RequestState:
        state = self._live[request_id].request.state
        assert state is not None, "the request has not started"
        return state

    def _make_room(self, plan: StepPlan) -> None:
        """Let cached prefixes give way to the rows of a step."""
        self._find_pages(
            sum(self._state.pages_needed(self._state_of(span.request_id), span.num_rows) for span in plan.spans)
        )

    def _find_pages(self, needed: int) -> bool:
        """Whether so many pages are free, now that cached prefixes have given way."""
        return needed <= self._state.pages.num_free or self.cache.make_room(needed)

    def available_pages(self, wanted: int) -> int:
        """See `PageSupply.available_pages`."""
        free = self._state.pages.num_free
        return free if free >= wanted else free + self.cache.num_reclaimable

    def pages_to_start(self, request_id: RequestId) -> int:
        """See `PageSupply.pages_to_start`."""
        live = self._live[request_id]
        needed = -(-len(live.request.token_ids) // self._state.page_tokens)
        image = self.cache.find(live.chain, live.request.token_ids, self._reusable_len(live))
        if image is None:
            return needed
        whole = image.pages[: image.committed // self._state.page_tokens]
        return needed - sum(not self.cache.is_reclaimable(page) for page in whole)

    def pages_from(self, request_id: RequestId) -> int:
        """See `PageSupply.pages_from`."""
        return sum(self.cache.num_other_holders(page) == 1 for page in self._state_of(request_id).pages)

    def clear_cache(self) -> int:
        """Drop all cached prefixes; returns how many there were."""
        return self.cache.clear()

    def status(self) -> LoopStatus:
        """Plain numbers of this moment."""
        running = len(self.scheduler.running)
        return LoopStatus(
            num_running=running,
            num_waiting=len(self._live) - running,
            num_pages=self._state.pages.num_pages,
            num_free_pages=self._state.pages.num_free,
            num_cached_pages=self.cache.num_reclaimable,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            last_step_rows=self._last_plan.num_rows,
            last_verify_rows=sum(span.verify_len for span in self._last_plan.spans),
            prefix=self.cache.statistics,
            speculation=self.engine.speculation_status,
            acceptance=deepcopy(self.engine.statistics),
            draft_health=deepcopy(self.engine.health.counts),
            memory=self.memory,
        )

    def check_integrity(self) -> None:
        """Assert that state, cache, queues and requests agree."""
        self._state.check_integrity()
        self.cache.check_integrity()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        held = [sample.request.request_id for live in self._live.values() for sample in live.samples]
        known = [*running, *waiting, *held]
        assert sorted(known, key=str) == sorted(self._live, key=str), f"queues hold {known}, requests {[*self._live]}"
        for request_id, live in self._live.items():
            assert (live.request.state is not None) == (request_id in running), f"{request_id} has state out of turn"
        assert set(self.engine.requests) == set(self._live), "the engine knows other requests"
