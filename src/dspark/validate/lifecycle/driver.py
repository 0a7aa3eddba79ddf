"""Drives the public engine loop, and looks at it after every step."""

from collections.abc import Sequence

from dspark.engine.request import Emission
from dspark.scheduler.plan import RequestId
from dspark.speculative.proposer import Proposer
from dspark.validate.lifecycle.ledger import Ledger, Tally
from dspark.validate.lifecycle.settings import EngineSettings
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish

MAX_STEPS = 5000


class Driver:
    """One engine under test, scheduled by itself.

    Args:
        subject, settings: which engine.
        proposer: another drafter than the checkpoint's.
    Attributes:
        loop: the engine.
        ledger: its requests.
        num_steps: engine steps so far.
    """

    def __init__(self, subject: Subject, settings: EngineSettings, proposer: Proposer | None = None) -> None:
        self.loop = subject.loop(settings) if proposer is None else subject.loop_with(settings, proposer)
        self.ledger = Ledger(subject, self.loop.engine)
        self.events = self.ledger.events
        self.num_steps = 0

    def submit(self, request_id: RequestId, wish: Wish, priority: int = 0, *, compares_drafts: bool = True) -> Tally:
        """Hand one request in."""
        tally = self.ledger.enter(request_id, wish, compares_drafts)
        self.loop.add(request_id, wish.prompt_ids, wish.params, priority=priority)
        return tally

    def submit_samples(
        self,
        request_ids: Sequence[RequestId],
        wishes: Sequence[Wish],
        priority: int = 0,
        *,
        compares_drafts: bool = True,
    ) -> None:
        """Hand several samples of one prompt in."""
        for request_id, wish in zip(request_ids, wishes, strict=True):
            self.ledger.enter(request_id, wish, compares_drafts)
        params = [wish.params for wish in wishes]
        self.loop.add_samples(list(request_ids), wishes[0].prompt_ids, params, priority=priority)
        self.events["prompts with several samples"] += 1

    def abort(self, request_id: RequestId) -> Tally:
        """Take a request back. What it gave until then is what it gives alone."""
        tally = self.ledger.leave(request_id)
        assert self.loop.abort(request_id), f"request {request_id!r} was there and its abort found nothing"
        assert not self.loop.abort(request_id), f"request {request_id!r} was aborted twice"
        self.loop.check_integrity()
        return tally

    def preempt(self, request_id: RequestId) -> None:
        """Take a running request's state away, as page pressure does."""
        self.loop.preempt(request_id)
        self.events["preemptions"] += 1
        self.loop.check_integrity()

    def clear_cache(self) -> None:
        """Drop cached prefixes."""
        self.events["dropped images"] += self.loop.clear_cache()
        self.loop.check_integrity()

    def is_running(self, request_id: RequestId) -> bool:
        """Whether a request holds state."""
        return request_id in self.ledger.live and self.loop.engine.requests[request_id].state is not None

    def committed(self, request_id: RequestId) -> int:
        """Tokens of a request with a final row; 0 while it waits."""
        state = self.loop.engine.requests[request_id].state
        return state.committed if state else 0

    def step(self) -> list[Emission]:
        """One engine step: every emission is checked, then every allocator."""
        num_running = sum(map(self.is_running, self.ledger.live))
        emissions = self.loop.step()
        self.num_steps += 1
        for emission in emissions:
            self.ledger.take(emission)
        self.loop.check_integrity()
        self.events["steps with several requests"] += len(emissions) > 1 or num_running > 1
        return emissions

    def run(self, max_steps: int = MAX_STEPS) -> None:
        """Step until nothing is left to do, then look for what was left behind."""
        self.run_on(max_steps)
        self.finish()

    def run_on(self, max_steps: int = MAX_STEPS) -> None:
        """Step until nothing is left to do; cached prefixes stay."""
        for _ in range(max_steps):
            if not self.loop.has_work:
                break
            self.step()
        else:
            raise AssertionError(f"{len(self.ledger.live)} requests are still there after {max_steps} steps")

    def finish(self) -> None:
        """Nothing runs any more: every request has ended, and everything is given back."""
        assert not self.ledger.live, f"requests never ended: {list(self.ledger.live)!r:.80}"
        assert not self.loop.engine.requests, f"requests are left over: {list(self.loop.engine.requests)!r:.80}"
        status = self.loop.status()
        assert (status.num_running, status.num_waiting) == (0, 0), f"the engine still counts requests: {status}"
        self.events["preemptions by the engine"] += status.num_preemptions - self.events["preemptions"]
        self.events["evicted images"] += status.prefix.evictions
        self.events["cache hits"] += status.prefix.hits
        self.loop.clear_cache()
        self.loop.check_integrity()
        status = self.loop.status()
        left = status.num_pages - status.num_free_pages
        assert left == 0, f"{left} of {status.num_pages} pages are held by nobody's request"
