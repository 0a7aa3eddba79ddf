"""Drives the engine below the loop, where every step, batch order and verify length is chosen by hand."""

from collections.abc import Sequence

from dspark.engine.request import Emission, Request
from dspark.scheduler.plan import PlannedSpan, RequestId, StepPlan
from dspark.state.model_state import StateImage
from dspark.validate.lifecycle.ledger import Ledger, Tally
from dspark.validate.lifecycle.settings import EngineSettings
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish


class ByHand:
    """One engine under test, scheduled by the caller.

    Attributes:
        engine: below the loop, which stays idle.
        ledger: its requests.
        num_steps: engine steps so far.
    """

    def __init__(self, subject: Subject, settings: EngineSettings) -> None:
        self.subject = subject
        self.engine = subject.loop(settings).engine
        self.ledger = Ledger(subject, self.engine)
        self.events = self.ledger.events
        self.num_steps = 0

    def start(self, request_id: RequestId, wish: Wish, image: StateImage | None = None) -> Request:
        """Hand a request in and give it state at once."""
        self.ledger.enter(request_id, wish)
        request = self.engine.add(request_id, wish.prompt_ids, wish.params, self.subject.max_model_len)
        self.engine.start(request_id, image)
        return request

    def fork(self, request_id: RequestId, copy_id: RequestId, wish: Wish) -> Request:
        """A second request from the first one's committed state; the first one's tokens are its prompt."""
        self.ledger.enter(copy_id, wish)
        copy = self.engine.fork(request_id, copy_id, wish.params, self.subject.max_model_len)
        assert tuple(copy.token_ids) == wish.prompt_ids, "a fork's prompt is what its source holds"
        self.events["forks"] += 1
        self.check()
        return copy

    def preempt(self, request_id: RequestId, image: StateImage | None = None) -> None:
        """Take a request's state away and give it another, empty or from an image."""
        self.engine.preempt(request_id)
        self.check()
        self.engine.start(request_id, image)
        self.events["preemptions"] += 1
        self.check()

    def swap(self, first: RequestId, second: RequestId) -> None:
        """Take two requests' states away and start them again, each in the slot that the other had."""
        slots = [self.slot(first), self.slot(second)]
        self.engine.preempt(first)
        self.engine.preempt(second)
        self.check()
        self.engine.start(first)
        self.engine.start(second)
        self.events["preemptions"] += 2
        self.events["requests in another slot"] += [self.slot(second), self.slot(first)] == slots
        self.check()

    def slot(self, request_id: RequestId) -> int:
        """The slot that a request holds."""
        state = self.engine.requests[request_id].state
        assert state is not None
        return state.slot

    def committed(self, request_id: RequestId) -> int:
        """Tokens of a request with a final row."""
        state = self.engine.requests[request_id].state
        return state.committed if state else 0

    def abort(self, request_id: RequestId) -> Tally:
        """Take a request back."""
        self.engine.remove(request_id)
        self.check()
        return self.ledger.leave(request_id)

    def step(
        self,
        request_ids: Sequence[RequestId],
        *,
        chunk: int | None = None,
        verify_lens: dict[RequestId, int] | None = None,
        num_padding: int = 0,
    ) -> list[Emission]:
        """One step of some requests in a given batch order.

        Args:
            request_ids: in batch order; those that have ended are passed over.
            chunk: known tokens of a request at most; None for all.
            verify_lens: drafts verified at most; all that the engine would verify where a request is not named.
            num_padding: inert rows behind the real ones.
        """
        spans = []
        for request_id in request_ids:
            if request_id not in self.ledger.live:
                continue
            needs = self.engine.needs(request_id)
            num_known = min(needs.num_pending, chunk or needs.num_pending)
            most = (verify_lens or {}).get(request_id, needs.verify_len)
            verify_len = min(needs.verify_len, most) if num_known == needs.num_pending else 0
            spans.append(PlannedSpan(request_id, num_known, verify_len))
        emissions = self.engine.step(StepPlan(tuple(spans)), num_padding) if spans else []
        self.num_steps += 1
        self.events["padding rows"] += num_padding
        self.events["steps with several requests"] += len(spans) > 1
        for emission in emissions:
            self.ledger.take(emission)
            if emission.finish_reason is not None:
                self.engine.remove(emission.request_id)
        self.check()
        return emissions

    def finish(self, max_steps: int = 2000) -> None:
        """Step until every request has ended, then look for what was left behind."""
        for _ in range(max_steps):
            if not self.ledger.live:
                break
            self.step(list(self.ledger.live))
        assert not self.ledger.live, f"requests never ended: {list(self.ledger.live)!r:.80}"
        self.check()

    def check(self) -> None:
        """Slots and pages are held exactly by the open requests and images."""
        self.engine.state.check_integrity()
