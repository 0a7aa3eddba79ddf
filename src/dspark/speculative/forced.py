"""Forced acceptance: pretend a given mean accepted length, to measure speed apart from draft quality.

Output text is meaningless under it; whoever switches it on must say so to the user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.config.errors import ConfigError
from dspark.ops.noise import Stream, keyed_uniform, seeds_tensor
from dspark.speculative.verify import Verdict, VerifySpan, draw_target_tokens, make_verdict, row_starts


@dataclass(frozen=True, slots=True)
class ForcedAcceptance:
    """Chance that each draft position is accepted given that those before it are.

    Attributes:
        probabilities: [G], in the minimum-variance form: ones, then one remainder, then zeros.
    """

    probabilities: tuple[float, ...]

    @classmethod
    def from_length(cls, length: float, num_speculative_tokens: int) -> ForcedAcceptance:
        """Mean accepted length, bonus counted: 3.78 over 7 drafts gives (1, 1, 0.78, 0, 0, 0, 0).

        Raises:
            ConfigError: `length` is outside [1, num_speculative_tokens + 1].
        """
        if not (math.isfinite(length) and 1.0 <= length <= num_speculative_tokens + 1):
            raise ConfigError(
                f"the forced acceptance length must be between 1 and {num_speculative_tokens + 1} "
                f"(num_speculative_tokens + 1, the bonus counts), not {length}"
            )
        whole = math.floor(length - 1.0)
        # 3.78 - 1 - 2 is 0.7799999999999998 in binary; twelve digits restore what was asked for.
        remainder = round(length - 1.0 - whole, 12)
        schedule = [1.0] * whole + [remainder] + [0.0] * num_speculative_tokens
        return cls(tuple(schedule[:num_speculative_tokens]))

    @classmethod
    def from_rate(cls, rate: float, num_speculative_tokens: int) -> ForcedAcceptance:
        """Share of drafts accepted, in [0, 1]: length = 1 + num_speculative_tokens * rate."""
        if not (math.isfinite(rate) and 0.0 <= rate <= 1.0):
            raise ConfigError(f"the forced acceptance rate must be between 0 and 1, not {rate}")
        return cls.from_length(1.0 + num_speculative_tokens * rate, num_speculative_tokens)

    @classmethod
    def from_options(
        cls, num_speculative_tokens: int, *, length: float | None = None, rate: float | None = None
    ) -> ForcedAcceptance | None:
        """Read the two spellings; None when neither is given, an error when both are."""
        if length is not None and rate is not None:
            raise ConfigError(
                f"forced acceptance was given as a length ({length}) and as a rate ({rate}); give one of them"
            )
        if length is not None:
            return cls.from_length(length, num_speculative_tokens)
        return None if rate is None else cls.from_rate(rate, num_speculative_tokens)

    @property
    def accepted_len(self) -> float:
        """Expected accepted length, bonus counted."""
        mean, prefix = 1.0, 1.0
        for probability in self.probabilities:
            prefix *= probability
            mean += prefix
        return mean

    def num_accepted(self, spans: Sequence[VerifySpan]) -> list[int]:
        """Accepted drafts per span, from one uniform keyed by (seed, position of the draft)."""
        return [self._count(span) for span in spans]

    def _count(self, span: VerifySpan) -> int:
        """Leading drafts whose uniform is below their probability; certain ones need no uniform."""
        verify_len = len(span.draft_ids)
        positions = torch.arange(verify_len, dtype=torch.int64) + span.sampling.anchor_position + 1
        seeds = seeds_tensor([span.sampling.params.seed] * verify_len)
        uniforms = keyed_uniform(seeds, positions, Stream.FORCED)[:, 0].tolist()
        pairs = zip(uniforms, self.probabilities[:verify_len], strict=True)
        return next((k for k, (uniform, chance) in enumerate(pairs) if uniform >= chance), verify_len)

    def verify(
        self,
        logits: Tensor,
        spans: Sequence[VerifySpan],
        *,
        num_valid_tokens: int | None = None,
        mask: Tensor | None = None,
    ) -> Verdict:
        """Emit the drafts' own ids at accepted positions and the target's token as the bonus.

        Args: as `dspark.speculative.verify.verify`.
        """
        starts = row_starts(spans, logits.shape[0])
        target_ids = draw_target_tokens(logits, spans, num_valid_tokens, mask)
        token_ids = [
            [*span.draft_ids[:accepted], target_ids[start + accepted]]
            for span, start, accepted in zip(spans, starts, self.num_accepted(spans), strict=True)
        ]
        return make_verdict(spans, token_ids, starts)
