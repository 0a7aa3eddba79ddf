"""How far a sample has been told, so that another replica can go on where one died.

The law makes this possible: the same request gives the same tokens on every replica, so what was told is skipped, and
what follows fits to the byte. A replica that says something else is found out.
"""

from dataclasses import dataclass, field, replace

from dspark.engine.request import Emission


class DisagreementError(RuntimeError):
    """Two replicas gave the same request different tokens."""


@dataclass
class SampleProgress:
    """What was told of a sample.

    Attributes:
        token_ids, num_chars: told so far, by all runs together.
        is_finished: this run has come to its end.
        is_told: so has some run, and the reader knows.
    """

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_finished: bool = False
    is_told: bool = False
    _seen_tokens: int = 0
    _seen_chars: int = 0

    def begin_again(self) -> None:
        """The request runs once more, from its first token."""
        self._seen_tokens = self._seen_chars = 0
        self.is_finished = False

    def take(self, emission: Emission) -> Emission | None:
        """The part of an emission that is not told yet; None where there is nothing.

        Example: 5 tokens are told, and a run that was begun again emits tokens 4 to 7: tokens 6 and 7 are handed on.

        Raises:
            DisagreementError: a token differs from the one that was told.
        """
        start, stop = self._seen_tokens, self._seen_tokens + len(emission.token_ids)
        told = self.token_ids[start:stop]
        if list(emission.token_ids[: len(told)]) != told:
            raise DisagreementError(f"tokens {start} to {start + len(told) - 1} of a request differ between replicas")
        skipped, hidden = len(told), max(min(self.num_chars - self._seen_chars, len(emission.text)), 0)
        self._seen_tokens, self._seen_chars = stop, self._seen_chars + len(emission.text)
        fresh = self._without(emission, skipped, hidden)
        self.token_ids += fresh.token_ids
        self.num_chars += len(fresh.text)
        self.is_finished = emission.finish_reason is not None
        if self.is_told:
            return None
        self.is_told = self.is_finished
        return fresh if fresh.token_ids or fresh.text or self.is_finished else None

    def _without(self, emission: Emission, skipped: int, hidden: int) -> Emission:
        """An emission less its first tokens and characters."""
        if not skipped and not hidden and not self.token_ids:
            return emission
        return replace(
            emission,
            token_ids=emission.token_ids[skipped:],
            num_accepted=max(emission.num_accepted - skipped, 0),
            text=emission.text[hidden:],
            origins=emission.origins[skipped:],
            logprobs=emission.logprobs[skipped:],
            prompt_logprobs=None if self.token_ids else emission.prompt_logprobs,
        )
