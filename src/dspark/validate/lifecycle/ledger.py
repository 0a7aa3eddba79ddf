"""The account of an engine's requests: what each wants, what it was given, and whether it is given the same alone."""

from collections import Counter
from dataclasses import dataclass, field

from dspark.engine.core import Engine
from dspark.engine.observer import RoundRecord
from dspark.engine.request import Emission
from dspark.scheduler.plan import RequestId
from dspark.validate.lifecycle.oracle import Block, Blocks
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Answer, Difference, Wish, first_difference


class MismatchError(AssertionError):
    """A request gave something else than it gives alone.

    Attributes:
        request_id, difference: which one, and where.
    """

    def __init__(self, request_id: RequestId, difference: Difference) -> None:
        super().__init__(f"request {request_id!r} is not as it is alone: {difference}")
        self.request_id = request_id
        self.difference = difference


@dataclass
class Tally:
    """A request on its way.

    Attributes:
        expected: its answer alone; None where nothing is promised.
        records: rounds that the engine decided, in order.
        drafts: blocks that it is drafted alone, by anchor position; None where they are not compared.
    """

    wish: Wish
    expected: Answer | None
    answer: Answer = field(default_factory=Answer)
    emissions: list[Emission] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)
    drafts: Blocks | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.emissions[0].num_cached_tokens if self.emissions else 0

    @property
    def num_accepted(self) -> int:
        """Accepted drafts that were emitted."""
        return sum(emission.num_accepted for emission in self.emissions)

    @property
    def is_cut_inside_block(self) -> bool:
        """Whether the output ended on an accepted draft, so that the bonus, at least, was cut off."""
        last = self.records[-1] if self.records else None
        return last is not None and last.num_accepted >= last.num_emitted


class Ledger:
    """Requests of one engine. It is the engine's observer of rounds.

    Args:
        subject: the model, which knows the answers.
        engine: under test.
    Attributes:
        live, done: requests that run or wait, and those that ended; aborted ones are in neither.
        events: counts of what happened, the evidence of scenarios.
    """

    def __init__(self, subject: Subject, engine: Engine) -> None:
        self.subject = subject
        self.engine = engine
        self.engine.observer = self
        self._width = engine.speculation.num_speculative_tokens if engine.speculation.proposer is None else 0
        self.live: dict[RequestId, Tally] = {}
        self.done: dict[RequestId, Tally] = {}
        self.events: Counter[str] = Counter()

    def observe(self, record: RoundRecord) -> None:
        """Keep a round; called by the engine."""
        self.live[record.request_id].records.append(record)
        self.events["rounds"] += 1
        self.events["rounds with accepted drafts"] += record.num_accepted > 0
        self.events["rounds with rejected drafts"] += record.num_accepted < record.verify_len

    def enter(self, request_id: RequestId, wish: Wish, compares_drafts: bool = True) -> Tally:
        """A request is about to be handed in.

        Args:
            compares_drafts: also compare its drafts with those that it gets alone, where the engine drafts at the
                model's full width. Wrong drafts change no token, so nothing else would show them.
        """
        assert request_id not in self.live
        self.events["requests"] += 1
        tally = Tally(wish, self.subject.oracle.answer(wish) if wish.is_exact else None)
        if compares_drafts and wish.is_exact and self._width == self.subject.block_size:
            tally.drafts = self.subject.drafts_of(wish)
        self.live[request_id] = tally
        return tally

    def leave(self, request_id: RequestId) -> Tally:
        """A request was taken back."""
        self.events["aborts"] += 1
        return self.live.pop(request_id)

    def take(self, emission: Emission) -> None:
        """Check an emission, and the request's whole answer so far.

        Raises:
            AssertionError: what holds for every emission does not; a `MismatchError` where the answer is another.
        """
        name = emission.request_id
        assert name in self.live, f"request {name!r} has ended, and the engine emitted {emission.token_ids} for it"
        tally = self.live[name]
        _check_emission(emission, tally, self.subject.num_valid_tokens)
        self._check_place(emission)
        self._check_drafts(name, tally)
        tally.emissions.append(emission)
        tally.answer = tally.answer.after(emission)
        self.events["tokens"] += len(emission.token_ids)
        self.events["accepted drafts"] += emission.num_accepted
        difference = None if tally.expected is None else first_difference(tally.expected, tally.answer)
        if difference is not None:
            raise MismatchError(name, difference)
        if emission.finish_reason is not None:
            self._settle(name)

    def _check_place(self, emission: Emission) -> None:
        """Every final token but the anchor has a committed row, neither fewer nor more."""
        request = self.engine.requests.get(emission.request_id)
        if request is not None and request.state is not None and emission.finish_reason is None:
            committed, wanted = request.state.committed, len(request.token_ids) - 1
            assert committed == wanted, f"request {emission.request_id!r} has {committed} rows, not {wanted}"

    def _check_drafts(self, name: RequestId, tally: Tally) -> None:
        """The block that was just judged is the one that the request gets alone."""
        anchor = len(tally.wish.prompt_ids) + len(tally.answer.token_ids) - 1
        if tally.drafts is None or not tally.records or tally.records[-1].anchor_position != anchor:
            return
        found, alone = Block.of(tally.records[-1]), tally.drafts.get(anchor)
        if found.token_ids and alone is not None and alone.token_ids:
            assert found == alone, f"request {name!r} is drafted {found} after position {anchor}, alone {alone}"
            self.events["blocks compared"] += 1

    def _settle(self, name: RequestId) -> None:
        """A request has ended: what is counted about it adds up."""
        tally = self.done[name] = self.live.pop(name)
        self.events["finished"] += 1
        self.events["ended inside a block"] += tally.is_cut_inside_block
        counted = tally.emissions[-1].statistics.emitted_tokens
        emitted = sum(record.num_emitted for record in tally.records)
        assert counted == emitted, f"the statistics of request {name!r} count {counted} tokens of {emitted}"


def _check_emission(emission: Emission, tally: Tally, num_valid_tokens: int) -> None:
    """What holds for any emission, whatever the tokens are."""
    name, tokens, params = emission.request_id, emission.token_ids, tally.wish.params
    assert tokens, f"request {name!r} got an empty emission"
    assert max(tokens) < num_valid_tokens, f"request {name!r} got the id {max(tokens)}, which has no token"
    assert len(tally.answer.token_ids) + len(tokens) <= params.max_tokens, f"request {name!r} got too many tokens"
    assert 0 <= emission.num_accepted <= min(emission.verify_len, len(tokens)), (
        f"request {name!r}: {emission.num_accepted} accepted of {emission.verify_len} verified, {len(tokens)} emitted"
    )
    assert len(tokens) <= emission.verify_len + 1, f"request {name!r} got more tokens than rows"
    origins = (True,) * emission.num_accepted + (False,) * (len(tokens) - emission.num_accepted)
    assert emission.origins == origins, f"request {name!r}: origins {emission.origins}, expected {origins}"
    num_logprobs = 0 if params.logprobs is None else len(tokens)
    assert len(emission.logprobs) == num_logprobs, f"request {name!r} got {len(emission.logprobs)} logprobs"
    is_wanted = params.prompt_logprobs is not None and not tally.emissions
    assert (emission.prompt_logprobs is not None) == is_wanted, (
        f"request {name!r}: prompt logprobs come with the first emission where asked for, and only there"
    )
