"""One streamed reply, gathered as it arrives: its tokens, where each came from, and what it cost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.config.sampling import SamplingParams
from dspark.engine import LLM, Emission
from dspark.speculative.statistics import AcceptanceStatistics


@dataclass
class Reply:
    """What a stream has delivered so far.

    Args:
        token_ids: the emitted tokens.
        origins: for each token, True when it is an accepted draft and False when it is the target's own.
        text: their text.
        finish_reason: why the output ended; None while it goes on, and when the user stopped it.
        seconds: wall time from the request to its last emission, prefill included.
        statistics: rounds so far; None before the first.
        is_interrupted: True when the user stopped it.
    """

    token_ids: list[int] = field(default_factory=list)
    origins: list[bool] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    seconds: float = 0.0
    statistics: AcceptanceStatistics | None = None
    is_interrupted: bool = False

    def add(self, emission: Emission) -> None:
        """Take in the tokens of one step."""
        num_own = len(emission.token_ids) - emission.num_accepted
        self.token_ids += emission.token_ids
        self.origins += [True] * emission.num_accepted + [False] * num_own
        self.text += emission.text
        self.finish_reason = emission.finish_reason
        self.statistics = emission.statistics

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over wall time."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> str:
        """The closing line."""
        parts = [
            f"{len(self.token_ids)} tokens in {self.seconds:.2f} s",
            f"{self.tokens_per_second:.1f} tokens/s",
        ]
        rounds = self.statistics
        if rounds is not None and rounds.num_drafted:
            parts.append(f"{rounds.rounds} rounds")
            parts.append(f"accepted length {rounds.accepted_len().value:.2f}")
            parts.append(f"{rounds.wasted_rows().value:.0%} of rows wasted")
        ending = "interrupted" if self.is_interrupted else f"ended by {self.finish_reason}"
        return ", ".join([*parts, ending])

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "origins": self.origins,
            "finish_reason": self.finish_reason,
            "interrupted": self.is_interrupted,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "statistics": self.statistics.to_dict() if self.statistics is not None else None,
        }


def gather(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    on_emission: Callable[[Emission], None] = lambda emission: None,
) -> Reply:
    """Stream one reply to a prompt of token ids; Ctrl-C ends it early and keeps what has arrived."""
    reply = Reply()
    started = time.perf_counter()
    try:
        for emission in llm.stream(prompt, params):
            reply.add(emission)
            reply.seconds = time.perf_counter() - started
            on_emission(emission)
    except KeyboardInterrupt:
        reply.is_interrupted = True
    return reply
