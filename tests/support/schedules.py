"""Drives an engine through a schedule that nobody would choose, and checks each request against itself alone.

All choices come from one `random.Random`, so a seed is a whole schedule.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dspark.config import DraftHealthConfig
from dspark.config.sampling import SamplingParams
from dspark.engine.core import Engine, Speculation
from dspark.engine.graphs import GraphPlan
from dspark.engine.request import Emission, Request
from dspark.scheduler.plan import PlannedSpan, StepPlan
from dspark.speculative.proposer import ContinuationProposer, Proposal, ProposalRequest, Proposer
from dspark.state.model_state import StateImage
from dspark.validate.poison import poison
from support.alone import Draft, Outcome, Stream, bits_of, cut, stream_of
from support.tiny_models import BLOCK, MAX_LEN, NUM_VALID, LetterTokenizer, tiny_model, tiny_state

MAX_STEPS = 400


@dataclass(frozen=True)
class Wish:
    """A request as a user makes it, and what it must give.

    `is_keyed` is false for requests of the ratio test: their tokens depend on the drafts by design, so they only
    keep the others company.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stream: Stream
    outcome: Outcome | None

    @property
    def is_keyed(self) -> bool:
        return self.outcome is not None


def make_wish(model_key: tuple[Any, ...], prompt: Sequence[int], params: SamplingParams, count: int) -> Wish:
    """A request with the answer that it gets alone; `count` tokens of its stream are known."""
    stream = stream_of(model_key, prompt, replace(params, sampler="keyed"), count)
    outcome = cut(stream, params, MAX_LEN) if params.sampler == "keyed" else None
    return Wish(tuple(prompt), params, stream, outcome)


class ScriptedProposer:
    """Proposes what `inner` proposes, with the true continuation put over some first drafts where the script says so.

    Every proposal of `inner` is kept, to be compared with the one that the request gets alone.
    """

    def __init__(self, inner: Proposer, rng: random.Random, truth: dict[Any, list[int]], boldness: float) -> None:
        self.inner = inner
        self.num_speculative_tokens = inner.num_speculative_tokens
        self.rng = rng
        self.truth = truth
        self.boldness = boldness
        self.seen: dict[Any, dict[int, Draft]] = {}

    def propose(self, requests: Sequence[ProposalRequest]) -> Proposal:
        proposal = self.inner.propose(requests)
        token_ids = proposal.token_ids.clone()
        for number, request in enumerate(requests):
            confidence = proposal.confidence_logits
            self.seen.setdefault(request.request_id, {})[request.anchor_position] = Draft(
                tuple(proposal.token_ids[number].tolist()),
                () if confidence is None else tuple(confidence[number].tolist()),
            )
            # The ratio test must know what a draft was drawn from, so nothing is put over its drafts.
            if request.sampling.params.sampler == "keyed" and self.rng.random() < self.boldness:
                start = request.anchor_position + 1
                right = self.truth[request.request_id][start : start + self.rng.randint(0, BLOCK)]
                token_ids[number, : len(right)] = torch.tensor(right, dtype=torch.int64)
        return replace(proposal, token_ids=token_ids)

    def forget(self, request_id: Any) -> None:
        self.inner.forget(request_id)


@dataclass
class Life:
    """A wish on its way: what it has said so far, and where its tokens start in the wish's own output."""

    wish: Wish
    emissions: list[Emission] = field(default_factory=list)
    forked_at: int = 0


class Drive:
    """One engine under one schedule.

    Args:
        rng: makes every choice.
        wishes: requests that arrive in any order, some of them several times.
        drafts: "own" the model's draft, "given" a continuation that is right or wrong by the script, "none" plain.
    """

    def __init__(
        self,
        model_key: tuple[Any, ...],
        rng: random.Random,
        wishes: Sequence[Wish],
        drafts: str,
        graphs: GraphPlan | None = None,
    ) -> None:
        self.rng = rng
        self.model = tiny_model(*model_key)
        self.state = tiny_state(self.model, num_slots=3, num_pages=48)
        self.truth: dict[Any, list[int]] = {}
        self.engine = Engine(self.model, self.state, LetterTokenizer(), self._speculation(drafts), graphs)
        self.script = ScriptedProposer(self.engine._proposer, rng, self.truth, rng.choice([0.0, 0.6, 1.0]))
        self.engine._proposer = self.script
        self.drafts = drafts
        self.waiting = list(wishes)
        self.lives: dict[Any, Life] = {}
        self.parked: list[Any] = []
        self.images: list[tuple[tuple[int, ...], StateImage]] = []
        self.next_id = 0

    def _speculation(self, drafts: str) -> Speculation:
        # Drafting stops and starts again within a schedule, or never does.
        health = self.rng.choice([None, DraftHealthConfig(2.0, 2.0, window=3, probe_after=4, probe_rounds=2)])
        if drafts == "own":
            return Speculation(BLOCK, health=health)
        if drafts == "none":
            return Speculation()
        given = ContinuationProposer(self.truth, BLOCK, NUM_VALID, num_right=lambda *_: self.rng.randint(0, BLOCK))
        return Speculation(BLOCK, proposer=given, health=health)

    def run(self) -> None:
        """Step until every request has ended."""
        for _ in range(MAX_STEPS):
            if not self.waiting and not self.lives:
                break
            self._disturb()
            self._start_some()
            self._step()
            self.state.check_integrity()
        else:
            raise AssertionError("the schedule does not end")
        for _, image in self.images:
            self.state.drop(image)
        self.state.check_integrity()
        assert self.state.pages.num_free == self.state.pages.num_pages, "pages are left over"

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _started(self) -> list[Any]:
        return [request_id for request_id in self.lives if request_id not in self.parked]

    def _add(self, wish: Wish) -> Any:
        request_id, self.next_id = self.next_id, self.next_id + 1
        self.truth[request_id] = wish.stream.all_ids
        self.engine.add(request_id, wish.prompt, wish.params, MAX_LEN)
        self.lives[request_id] = Life(wish)
        self.parked.append(request_id)
        return request_id

    def _start_some(self) -> None:
        if self.waiting and (not self.lives or self._chance(0.5)):
            self._add(self.waiting.pop(self.rng.randrange(len(self.waiting))))
        self.rng.shuffle(self.parked)
        while (
            self.parked and len(self._started()) < self.state.num_slots and (not self._started() or self._chance(0.7))
        ):
            request_id = self.parked.pop()
            self.engine.start(request_id, self._image_for(self.engine.requests[request_id]))

    def _image_for(self, request: Request) -> StateImage | None:
        """An image of the first tokens of a request, if there is one and fate wants it."""
        if request.prompt_logprobs is not None and not request.origins:
            return None  # every row of its prompt is asked for
        fitting = [
            image
            for tokens, image in self.images
            if len(tokens) < len(request.token_ids) and list(tokens) == request.token_ids[: len(tokens)]
        ]
        return self.rng.choice(fitting) if fitting and self._chance(0.8) else None

    def _disturb(self) -> None:
        """Things that happen between steps and must not be noticed."""
        started = self._started()
        if started and self._chance(0.25):
            self._keep_image(self.rng.choice(started))
        if started and self._chance(0.12):
            victim = self.rng.choice(started)
            self.engine.preempt(victim)
            self.parked.append(victim)
        elif started and self._chance(0.05):
            self._abort(self.rng.choice(started))
        elif started and len(started) < self.state.num_slots and self._chance(0.15):
            self._fork(self.rng.choice(started))
        if self._chance(0.3):
            poison(self.state)
        self.state.check_integrity()

    def _keep_image(self, request_id: Any) -> None:
        request = self.engine.requests[request_id]
        tokens = tuple(request.token_ids[: request.state.committed])
        self.images.append((tokens, self.engine.image(request_id)))
        if len(self.images) > 3:
            _, image = self.images.pop(self.rng.randrange(3))
            self.state.drop(image)

    def _abort(self, request_id: Any) -> None:
        life = self.lives.pop(request_id)
        self.engine.remove(request_id)
        if life.forked_at == 0 and self._chance(0.5):
            self.waiting.append(life.wish)

    def _fork(self, request_id: Any) -> None:
        """A copy with the same parameters goes the same way, where nothing but the tokens decides."""
        life, request = self.lives[request_id], self.engine.requests[request_id]
        params = life.wish.params
        if params.has_penalties or params.stop or params.structured or not life.wish.is_keyed:
            return
        copy_id, self.next_id = self.next_id, self.next_id + 1
        self.truth[copy_id] = self.truth[request_id]
        copy = self.engine.fork(request_id, copy_id, replace(params, prompt_logprobs=None), MAX_LEN)
        copy.max_len = request.max_len
        self.lives[copy_id] = Life(life.wish, forked_at=len(request.token_ids) - len(life.wish.prompt))

    def _step(self) -> None:
        spans = [self._span(request_id) for request_id in self._started() if self._chance(0.8)]
        if not spans:
            return
        self.rng.shuffle(spans)
        for emission in self.engine.step(StepPlan(tuple(spans)), num_padding=self.rng.choice([0, 0, 1, 3])):
            life = self.lives[emission.request_id]
            life.emissions.append(emission)
            if emission.finish_reason is not None:
                self._settle(emission.request_id, life)

    def _span(self, request_id: Any) -> PlannedSpan:
        needs = self.engine.needs(request_id)
        num_known = needs.num_pending if self._chance(0.6) else self.rng.randint(1, needs.num_pending)
        if num_known < needs.num_pending:
            return PlannedSpan(request_id, num_known)
        verify_len = needs.verify_len if self._chance(0.6) else self.rng.randint(0, needs.verify_len)
        return PlannedSpan(request_id, num_known, verify_len)

    def _settle(self, request_id: Any, life: Life) -> None:
        """The law: the request gave what it gives alone."""
        if self._chance(0.3):
            self._keep_image(request_id)
        request = self.engine.remove(request_id)
        del self.lives[request_id]
        self._check_emissions(request, life)
        if life.wish.outcome is not None:
            self._check_outcome(request, life, life.wish.outcome)

    def _check_emissions(self, request: Request, life: Life) -> None:
        emitted = [token for emission in life.emissions for token in emission.token_ids]
        assert emitted == request.output_ids, "every token is emitted once"
        assert len(request.origins) == len(emitted)
        assert all(emission.finish_reason is None for emission in life.emissions[:-1])
        assert max(emitted) < NUM_VALID
        assert [e.prompt_logprobs for e in life.emissions[1:]] == [None] * (len(life.emissions) - 1)
        statistics = request.statistics
        assert sum(statistics.accepted) >= sum(emission.num_accepted for emission in life.emissions)

    def _check_outcome(self, request: Request, life: Life, outcome: Outcome) -> None:
        start = life.forked_at
        assert tuple(request.output_ids) == outcome.token_ids[start:]
        assert request.finish_reason == outcome.finish_reason
        assert request.logprobs == list(outcome.logprobs[start:])
        if start == 0:
            wanted = outcome.prompt_logprobs if request.params.prompt_logprobs is not None else None
            assert life.emissions[0].prompt_logprobs == wanted
            assert "".join(emission.text for emission in life.emissions) == outcome.text
        if self.drafts == "own":
            seen = self.script.seen.get(request.request_id, {})
            alone = {anchor: life.wish.stream.drafts[anchor] for anchor in seen}
            assert bits_of(seen) == bits_of(alone), "a draft depends on the schedule"
