"""What a row of logits needs to become a token: parameters, position, and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.config.sampling import SamplingParams
from dspark.ops.noise import Stream
from dspark.sampling.constraint import TokenConstraint


def changes_logits(params: SamplingParams) -> bool:
    """Tell whether logit bias or a penalty is on."""
    return bool(params.logit_bias) or params.has_penalties


def is_plain_greedy(params: SamplingParams) -> bool:
    """Tell whether the token is the argmax of the raw row."""
    return params.is_greedy and not changes_logits(params)


def uses_ratio_test(params: SamplingParams) -> bool:
    """Tell whether the ratio test decides; at temperature 0 both samplers are the argmax."""
    return params.sampler == "ratio" and not params.is_greedy


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Context of one row of logits.

    Attributes:
        params: the request's sampling parameters.
        position: absolute position of the token that this row draws.
        prompt_len: the first `prompt_len` ids of `history` are the prompt.
        history: ids of final tokens before the drawn one, prompt included.
        tentative: draft ids between `history` and the drawn token; they count as output.
        stream: noise domain, see `dspark.ops.noise.Stream`.
    """

    params: SamplingParams
    position: int
    prompt_len: int
    history: Sequence[int] = ()
    tentative: Sequence[int] = ()
    stream: int = Stream.TARGET


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """Sampling context of a request at the start of a round.

    Attributes:
        params: sampling parameters.
        prompt_len: number of prompt tokens, at least 1.
        history: all final token ids, prompt first, anchor last. May be the engine's own list; it is only read.
        constraint: what may follow the final tokens, or None. May be the engine's own; it is only copied.
    """

    params: SamplingParams
    prompt_len: int
    history: Sequence[int]
    constraint: TokenConstraint | None = None

    @property
    def anchor_id(self) -> int:
        """The last final token, first input of the draft block and of the verify pass."""
        return self.history[-1]

    @property
    def anchor_position(self) -> int:
        """Absolute position of the anchor."""
        return len(self.history) - 1

    def row(self, tentative: Sequence[int] = (), stream: int = Stream.TARGET) -> RowSampling:
        """Context of the row that draws the token after `history + tentative`."""
        position = len(self.history) + len(tentative)
        return RowSampling(self.params, position, self.prompt_len, self.history, tentative, stream)

    def rows(self, draft_ids: Sequence[int]) -> list[RowSampling]:
        """Contexts of the 1 + verify_len rows of a verify pass over [anchor, *draft_ids]."""
        return [self.row(draft_ids[:k]) for k in range(len(draft_ids) + 1)]
