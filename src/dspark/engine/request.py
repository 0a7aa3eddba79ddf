"""One request in the engine: its final tokens, its pending drafts, and where its output ends."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.engine.text import TextStream
from dspark.sampling import RequestSampling, TokenConstraint
from dspark.scheduler.plan import RequestId
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.state.model_state import RequestState


@dataclass
class PendingDraft:
    """A block that waits for verification.

    Attributes:
        token_ids: [G] drafts.
        probabilities: [G, V] float64 for the ratio test, or None.
        verify_len: how many of them are verified.
        confidence_logits: [G], kept for observers only, or None.
    """

    token_ids: list[int]
    probabilities: Tensor | None
    verify_len: int
    confidence_logits: Tensor | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the target's raw row.

    Attributes:
        token: the value.
        top: the best ids of the row with their values, best first; as many as were asked for.
        token_id: the token.
        rank: its place among all ids of the row, 1 for the best.
    """

    token: float
    top: tuple[tuple[int, float], ...]
    token_id: int
    rank: int


@dataclass
class Request:
    """A request. `token_ids` holds final tokens only: the prompt, then the output.

    Attributes:
        origins, logprobs: of each emitted token; logprobs only where asked for.
        prompt_logprobs: of the prompt tokens whose rows have been computed, None in place of the first, which no row
            predicts; None where nobody asked.
        num_cached_tokens: prompt tokens whose rows came from a cache.
        open_constraint: makes the constraint of an empty output, where the output is structured.
        constraint: what may follow the output, made when it is needed; see `live_constraint`.
    """

    request_id: RequestId
    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    max_len: int
    text: TextStream
    state: RequestState | None = None
    draft: PendingDraft | None = None
    origins: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    statistics: AcceptanceStatistics = field(default_factory=lambda: AcceptanceStatistics(0))
    finish_reason: str | None = None
    open_constraint: Callable[[], TokenConstraint] | None = None
    constraint: TokenConstraint | None = None

    @property
    def output_ids(self) -> list[int]:
        """Emitted tokens."""
        return self.token_ids[self.prompt_len :]

    @property
    def committed(self) -> int:
        """Tokens with a final row; 0 without state."""
        return self.state.committed if self.state else 0

    @property
    def num_pending(self) -> int:
        """Known tokens without a committed row, the anchor included."""
        return len(self.token_ids) - self.committed

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    @property
    def sampling(self) -> RequestSampling:
        """Sampling context at the start of a round."""
        return RequestSampling(self.params, self.prompt_len, self.token_ids, self.live_constraint())

    def live_constraint(self) -> TokenConstraint | None:
        """What may follow the output, or None; after a preemption it is made anew from the emitted tokens."""
        if self.constraint is None and self.open_constraint is not None:
            self.constraint = self.open_constraint()
            for token in self.output_ids:
                is_allowed = self.constraint.advance(token)
                assert is_allowed, "an emitted token is not allowed by the request's own constraint"
        return self.constraint

    def num_prompt_rows(self, num_known: int) -> int:
        """Rows among the next `num_known` whose log-probabilities of prompt tokens are wanted; they end the span.

        Rows that a replay computes again were collected before.
        """
        if self.prompt_logprobs is None or self.state is None:
            return 0
        collected = len(self.prompt_logprobs) - 1
        assert self.state.committed <= collected or self.origins, "rows of the prompt were skipped"
        return max(min(self.state.committed + num_known, self.prompt_len - 1) - collected, 0)


@dataclass(frozen=True)
class Emission:
    """What a step hands out for one request.

    Attributes:
        request_id: key.
        token_ids: emitted tokens; the first `num_accepted` are accepted drafts, the rest the target's own.
        text: text that has become certain; held back while a character or a stop string may still be open.
        finish_reason: "stop", "length" or "error" with the last emission, None before. "error" is a structured output
            that its grammar could not bring to an end within the limits of a step.
        statistics: the request's rounds so far.
        prompt_len: tokens of the prompt.
        verify_len: drafts that were verified in the round.
        origins: for each token, True for an accepted draft and False for the target's own.
        logprobs: for each token where asked for, else empty.
        prompt_logprobs: for each prompt token, None for the first; on the first emission, where asked for.
        num_cached_tokens: prompt tokens whose rows came from a cache.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_accepted: int
    text: str
    finish_reason: str | None
    statistics: AcceptanceStatistics
    prompt_len: int = 0
    verify_len: int = 0
    origins: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
