"""One sample of an answer as it grows, and the figures that go with an answer."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.engine.request import Emission, TokenLogprob
from dspark.speculative.statistics import AcceptanceStatistics


@dataclass
class Choice:
    """A sample.

    Attributes:
        index: in the answer.
        prompt_index: of the prompt that it continues.
        prompt_ids: its tokens.
        seed: under which it can be repeated.
        is_scoring: only the prompt's log-probabilities were asked for; the one token that was drawn is dropped.
        text, token_ids, origins, logprobs: so far.
        prompt_logprobs: of the prompt tokens, where asked for.
        finish_reason: once it has ended.
        num_cached_tokens: prompt tokens that came from a cache.
        statistics: of its rounds.
        decoder: of its tokens' bytes.
    """

    index: int
    prompt_index: int
    prompt_ids: Sequence[int]
    seed: int
    is_scoring: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    statistics: AcceptanceStatistics = field(default_factory=lambda: AcceptanceStatistics(0))
    decoder: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("replace"))

    def take(self, emission: Emission) -> None:
        """Add what a step emitted."""
        self.num_cached_tokens = emission.num_cached_tokens
        self.statistics = emission.statistics
        self.finish_reason = emission.finish_reason
        if emission.prompt_logprobs is not None:
            self.prompt_logprobs = emission.prompt_logprobs
        if self.is_scoring:
            self.finish_reason = emission.finish_reason and "length"
            return
        self.text += emission.text
        self.token_ids += emission.token_ids
        self.origins += emission.origins
        self.logprobs += emission.logprobs

    def figures(self, *, with_origins: bool) -> dict[str, Any]:
        """The choice's part of the `dspark` object."""
        figures: dict[str, Any] = {
            "index": self.index,
            "seed": self.seed,
            "num_cached_tokens": self.num_cached_tokens,
            **round_figures([self.statistics]),
        }
        if with_origins:
            figures |= {"token_ids": self.token_ids, "origins": self.origins}
        return figures


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """The `usage` object: each prompt counts once, however many samples continue it."""
    firsts = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(len(choice.prompt_ids) for choice in firsts)
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
    }


def answer_figures(choices: Sequence[Choice], speculation: str, *, with_origins: bool) -> dict[str, Any]:
    """The `dspark` object of an answer: how it was made, and the seed that makes it again."""
    return {
        "speculation": speculation,
        "seed": choices[0].seed,
        "num_cached_tokens": usage(choices)["prompt_tokens_details"]["cached_tokens"],
        **round_figures([choice.statistics for choice in choices]),
        "choices": [choice.figures(with_origins=with_origins) for choice in choices],
    }


def round_figures(found: Sequence[AcceptanceStatistics]) -> dict[str, Any]:
    """Rounds and drafts of some samples; accepted_len is None without a round."""
    rounds = sum(statistics.rounds for statistics in found)
    accepted = sum(statistics.num_accepted for statistics in found)
    return {
        "rounds": rounds,
        "accepted_len": 1 + accepted / rounds if rounds else None,
        "num_drafted": sum(statistics.num_drafted for statistics in found),
        "num_verified": sum(statistics.num_verified for statistics in found),
        "num_accepted": accepted,
    }
