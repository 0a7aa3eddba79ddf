"""The engine: requests in, steps of one ragged pass each, emissions out. `step` reads as the round of the paper."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.config.errors import ConfigError, DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine.device_round import DeviceRounds
from dspark.engine.finish import take_tokens
from dspark.engine.grammar import GrammarCompiler
from dspark.engine.graph_proposer import GraphProposer
from dspark.engine.graphs import GraphPlan
from dspark.engine.intake import check_request
from dspark.engine.observer import RoundObserver, record_round
from dspark.engine.proposing import pending_drafts
from dspark.engine.request import Emission, Request, TokenLogprob
from dspark.engine.row_logprobs import split_rows, token_logprobs
from dspark.engine.runner import DraftRunner, PassOutput, SpanTokens, TargetRunner
from dspark.engine.speculation import RUNNING, Speculation
from dspark.engine.stopwatch import Stopwatch
from dspark.engine.text import TextStream
from dspark.engine.tokenizer import TextTokenizer
from dspark.models.build import Model
from dspark.scheduler.plan import PlannedSpan, RequestId, RequestNeeds, StepPlan
from dspark.speculative.device_lengths import DeviceLengths
from dspark.speculative.dspark import DSparkProposer
from dspark.speculative.health import DraftHealth
from dspark.speculative.proposer import NoProposer, ProposalRequest, Proposer
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.speculative.verify import Verdict, VerifySpan, constraint_mask, verify
from dspark.state.model_state import ModelState, RequestState, StateImage

__all__ = ["Engine", "Speculation"]


class Engine:
    """Requests over one model and one state. Whoever calls `step` plans it; the tokens do not depend on the plan."""

    def __init__(
        self,
        model: Model,
        state: ModelState,
        tokenizer: TextTokenizer,
        speculation: Speculation,
        graphs: GraphPlan | None = None,
    ) -> None:
        self.model = model
        self.state = state
        self.tokenizer = tokenizer
        self.speculation = speculation
        self.num_valid_tokens = min(model.plan.vocab_size, tokenizer.vocab_size)
        self.requests: dict[RequestId, Request] = {}
        self.observer: RoundObserver | None = None
        self.stopwatch = Stopwatch()
        self.graphs = graphs
        self._target = self._make_target()
        self._draft: DraftRunner | None = None
        self._proposer = speculation.proposer or self._own_proposer()
        self._require_room(1 + self._proposer.num_speculative_tokens)
        self.statistics = AcceptanceStatistics(self._proposer.num_speculative_tokens)
        self.health = DraftHealth(speculation.health)
        self.grammars = GrammarCompiler(tokenizer, model.plan.eos_token_ids, self.num_valid_tokens)

    @property
    def speculation_status(self) -> str:
        """ "running", or "not running because ..."."""
        if self._proposer.num_speculative_tokens == 0:
            return f"not running because {self.speculation.inactive_because}"
        return RUNNING if self.health.is_well else f"not running because {self.health.reason}"

    def _require_room(self, max_query_len: int) -> None:
        """Refuse a state whose rings a verify pass would corrupt."""
        if self.state.max_query_len < max_query_len:
            raise ConfigError(
                f"the state was made for {self.state.max_query_len} tentative rows, but a round of "
                f"{max_query_len - 1} drafts writes {max_query_len}: make it with max_query_len={max_query_len}"
            )

    @property
    def target(self) -> TargetRunner:
        """Runs the target's passes."""
        return self._target

    def _make_target(self) -> TargetRunner:
        return TargetRunner(self.model, self.state, self.graphs, self.stopwatch)

    def _make_draft(self, width: int) -> DraftRunner:
        return DraftRunner(self.model, self.state, width, self.graphs, self.num_valid_tokens, self.stopwatch)

    def make_rounds(self, plan: GraphPlan, lengths: DeviceLengths) -> DeviceRounds:
        """Rounds on the device over this engine's state."""
        return DeviceRounds(
            self.model, self.state, plan, self.speculation, lengths, self.num_valid_tokens, self.stopwatch
        )

    def _own_proposer(self) -> Proposer:
        width = self.speculation.num_speculative_tokens
        if width == 0:
            return NoProposer()
        self._draft = self._make_draft(width)
        proposer = DSparkProposer(self._draft, width, self.num_valid_tokens)
        return GraphProposer(proposer, self._draft.graphs, self._draft.states) if self._draft.graphs else proposer

    def add(
        self, request_id: RequestId, prompt_ids: Sequence[int], params: SamplingParams, max_model_len: int
    ) -> Request:
        """Take a request in; it holds no state until `start`.

        Raises:
            ConfigError: the prompt is empty or too long, an id is outside the vocabulary, or a structured output has no
                usable form.
        """
        check_request(prompt_ids, params, max_model_len=max_model_len, num_valid_tokens=self.num_valid_tokens)
        if request_id in self.requests:
            raise ConfigError(f"the request id {request_id!r} is running already: choose another")
        request = Request(
            request_id=request_id,
            params=params,
            token_ids=list(prompt_ids),
            prompt_len=len(prompt_ids),
            max_len=min(len(prompt_ids) + params.max_tokens, max_model_len),
            text=TextStream(self.tokenizer.decode, params.stop),
            statistics=AcceptanceStatistics(self._proposer.num_speculative_tokens),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        if params.structured is not None:
            request.open_constraint = self.grammars.start(params.structured, avoids_eos=params.ignore_eos).copy
        self.requests[request_id] = request
        return request

    def start(self, request_id: RequestId, image: StateImage | None = None) -> None:
        """Give a request its state, fresh or from an image of its own first tokens."""
        request = self.requests[request_id]
        assert request.state is None, "the request has state already"
        request.state = self.state.restore(image) if image else self.state.open()
        if self._draft is not None:
            self._draft.states[request_id] = request.state

    def preempt(self, request_id: RequestId) -> None:
        """Take a request's state away; final tokens stay, and are replayed after the next `start`."""
        request = self.requests[request_id]
        if request.state is not None:
            self.state.close(request.state)
        request.state = None
        request.draft = None
        request.constraint = None
        self._proposer.forget(request_id)

    def remove(self, request_id: RequestId) -> Request:
        """End a request, finished or not, and free what it holds."""
        self.preempt(request_id)
        return self.requests.pop(request_id)

    def fork(self, request_id: RequestId, copy_id: RequestId, params: SamplingParams, max_model_len: int) -> Request:
        """A second request that continues the first one's tokens from its committed state; they are its prompt."""
        source = self.requests[request_id]
        assert source.state is not None
        if params.prompt_logprobs is not None:
            raise ConfigError(
                "prompt_logprobs need the rows of the whole prompt, and a fork has none: ask for them "
                "on the request that it continues"
            )
        copy = self.add(copy_id, source.token_ids, params, max_model_len)
        try:
            copy.state = self.state.fork(source.state)
        except DSparkError:
            del self.requests[copy_id]
            raise
        if self._draft is not None:
            self._draft.states[copy_id] = copy.state
        return copy

    def image(self, request_id: RequestId, at: int | None = None) -> StateImage:
        """The request's state at its committed position, or as it was a little before, see `ModelState.image`."""
        state = self.requests[request_id].state
        assert state is not None
        return self.state.image(state, at)

    def needs(self, request_id: RequestId) -> RequestNeeds:
        """What a scheduler must know of a request."""
        request = self.requests[request_id]
        verify_len = request.draft.verify_len if request.draft else 0
        committed, num_pages = (request.state.committed, len(request.state.pages)) if request.state else (0, 0)
        return RequestNeeds(request_id, request.num_pending, verify_len, request.max_len, committed, num_pages)

    def step(self, plan: StepPlan, num_padding: int = 0) -> list[Emission]:
        """One round of every planned request.

        Returns:
            an emission for each span that reached its anchor; prefill chunks before the last emit nothing.
        """
        spans = [self._span_tokens(planned) for planned in plan.spans]
        output = self._target.forward(spans, num_padding)
        deciding = [planned for planned in plan.spans if self._reaches_anchor(planned)]
        prompt_rows, logits = split_rows(output.logits, [self._logit_counts(planned) for planned in plan.spans])
        with self.stopwatch.phase("sampling"):
            verdict = self._verify(deciding, logits)
        self._keep_prompt_logprobs(plan, prompt_rows)
        emissions, committed = self._commit(plan, verdict, logits)
        self._absorb(plan, spans, committed, output)
        self._propose([emission.request_id for emission in emissions if emission.finish_reason is None])
        return emissions

    def _span_tokens(self, planned: PlannedSpan) -> SpanTokens:
        """Rows of a planned span: known tokens from the committed position, then drafts."""
        request = self.requests[planned.request_id]
        state = request.state
        assert state is not None and 1 <= planned.num_known <= request.num_pending
        start = state.committed
        known = request.token_ids[start : start + planned.num_known]
        is_last = self._reaches_anchor(planned)
        drafts = request.draft.token_ids[: planned.verify_len] if request.draft and is_last else []
        assert len(drafts) == planned.verify_len, "the plan verifies drafts that do not exist"
        history = request.token_ids[max(start - self._target.history_len, 0) : start]
        return SpanTokens(state, history, known + drafts, sum(self._logit_counts(planned)))

    def _reaches_anchor(self, planned: PlannedSpan) -> bool:
        """Whether the span emits: its known rows end at the anchor."""
        return planned.num_known == self.requests[planned.request_id].num_pending

    def _logit_counts(self, planned: PlannedSpan) -> tuple[int, int]:
        """Rows of logits that a span wants: those of prompt tokens, then those of the anchor and its drafts."""
        num_prompt = self.requests[planned.request_id].num_prompt_rows(planned.num_known)
        return num_prompt, 1 + planned.verify_len if self._reaches_anchor(planned) else 0

    def _verify(self, deciding: list[PlannedSpan], logits: Tensor) -> Verdict:
        """Judge the drafts of all requests that have reached their anchors; logits hold their rows."""
        spans = []
        for planned in deciding:
            request = self.requests[planned.request_id]
            drafts = request.draft.token_ids[: planned.verify_len] if request.draft else []
            probabilities = request.draft.probabilities if request.draft else None
            spans.append(VerifySpan(planned.request_id, request.sampling, drafts, probabilities))
        judge = self.speculation.forced.verify if self.speculation.forced else verify
        mask = constraint_mask(spans, self.num_valid_tokens, logits.device)
        return judge(logits, spans, num_valid_tokens=self.num_valid_tokens, mask=mask)

    def _keep_prompt_logprobs(self, plan: StepPlan, prompt_rows: list[Tensor]) -> None:
        """Collect what the rows of prompt tokens say of the tokens after them."""
        for planned, logits in zip(plan.spans, prompt_rows, strict=True):
            request = self.requests[planned.request_id]
            if request.prompt_logprobs is not None and len(logits):
                start = len(request.prompt_logprobs)
                token_ids, count = request.token_ids[start : start + len(logits)], request.params.prompt_logprobs or 0
                request.prompt_logprobs += token_logprobs(logits, token_ids, count, self.num_valid_tokens)

    def _commit(self, plan: StepPlan, verdict: Verdict, logits: Tensor) -> tuple[list[Emission], dict[RequestId, int]]:
        """Move every request on: the rows of accepted tokens become final. The only place where state moves.

        Returns:
            emissions, and the rows committed of each request.
        """
        decided = {request_id: number for number, request_id in enumerate(verdict.request_ids)}
        emissions, committed = [], {}
        for planned in plan.spans:
            request = self.requests[planned.request_id]
            number = decided.get(planned.request_id)
            num_rows = planned.num_known
            if number is not None:
                rows = logits[verdict.row_starts[number] :]
                emission = self.emit(request, planned, verdict.token_ids[number], verdict.num_accepted[number], rows)
                num_rows += emission.num_accepted
                emissions.append(emission)
            assert request.state is not None
            self.state.commit(request.state, num_rows)
            committed[planned.request_id] = num_rows
        return emissions, committed

    def emit(
        self,
        request: Request,
        planned: PlannedSpan,
        tokens: Sequence[int],
        accepted: int,
        logits: Tensor | None = None,
    ) -> Emission:
        """Append tokens of a verdict up to a stop or a limit, and tell everyone who counts.

        Args:
            planned: the rows that decided.
            tokens: accepted drafts, then the bonus.
            logits: rows of the tokens, where their log-probabilities are wanted.
        """
        kept = take_tokens(request, tokens, self.model.plan.eos_token_ids)
        is_first = not request.origins
        origins = [place < accepted for place in range(len(kept))]
        found: list[TokenLogprob] = []
        if request.params.logprobs is not None:
            assert logits is not None
            found = token_logprobs(logits[: len(kept)], kept, request.params.logprobs, self.num_valid_tokens)
        request.origins += origins
        request.logprobs += found
        # The end of prefill or replay is no round: nothing could be drafted before it.
        if planned.num_known == 1 and not is_first:
            self._count_round(request, planned.verify_len, accepted, len(kept))
        request.draft = None
        return Emission(
            request_id=request.request_id,
            token_ids=tuple(kept),
            num_accepted=min(accepted, len(kept)),
            text=request.text.take(is_final=request.finish_reason is not None),
            finish_reason=request.finish_reason,
            statistics=request.statistics,
            prompt_len=request.prompt_len,
            verify_len=planned.verify_len,
            origins=tuple(origins),
            logprobs=tuple(found),
            prompt_logprobs=tuple(request.prompt_logprobs) if is_first and request.prompt_logprobs else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _count_round(self, request: Request, verify_len: int, num_accepted: int, num_emitted: int) -> None:
        """Tell everyone who counts about a round whose tokens were just appended."""
        num_drafted = len(request.draft.token_ids) if request.draft else 0
        for statistics in (request.statistics, self.statistics):
            statistics.record(verify_len, num_accepted, num_drafted=num_drafted, num_emitted=num_emitted)
        self.health.observe(num_accepted + 1, was_drafted=num_drafted > 0)
        if self.observer is not None:
            self.observer.observe(record_round(request, verify_len, num_accepted, num_emitted))

    def _absorb(
        self, plan: StepPlan, spans: list[SpanTokens], committed: dict[RequestId, int], output: PassOutput
    ) -> None:
        """Hand target_hidden of committed rows to the draft, in every round, drafted or not."""
        if self._draft is None:
            return
        rows: list[int] = []
        counts: list[tuple[RequestState, int]] = []
        offset = 0
        for planned, span in zip(plan.spans, spans, strict=True):
            num_rows = committed[planned.request_id]
            rows.extend(range(offset, offset + num_rows))
            counts.append((span.state, num_rows))
            offset += len(span.token_ids)
        assert output.target_hidden is not None
        self._draft.absorb(counts, output.target_hidden[torch.tensor(rows, device=output.target_hidden.device)])

    def _propose(self, request_ids: list[RequestId]) -> None:
        """Draft the next block of every request that goes on, and choose how much of it is verified."""
        wanted = [request for request in map(self.requests.__getitem__, request_ids) if request.num_left > 1]
        if not wanted or self._proposer.num_speculative_tokens == 0 or not self.health.is_drafting:
            return
        asked = [ProposalRequest(request.request_id, request.sampling) for request in wanted]
        proposal = self._proposer.propose(asked)
        drafts = pending_drafts(proposal, [request.num_left for request in wanted], self.speculation)
        for request, draft in zip(wanted, drafts, strict=True):
            request.draft = draft
