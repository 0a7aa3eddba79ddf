"""SamplingParams: what one request asks of the sampler, checked when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Literal

from dspark.config.checks import require_bool, require_choice, require_int, require_number
from dspark.config.errors import ConfigError
from dspark.config.structured import StructuredOutput

SamplerName = Literal["keyed", "ratio"]
SAMPLERS: tuple[str, ...] = ("keyed", "ratio")
MAX_LOGPROBS = 64
# Above any vocabulary; values travel as 64-bit integers.
MAX_TOP_K = 2**31 - 1
# The noise key is a pair of unsigned 64-bit words: (seed, position).
MAX_SEED = 2**64 - 1
# Every JSON reader keeps integers of so many bits.
JSON_SEED_BITS = 53


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and where they end.

    Args:
        temperature: 0 takes the argmax; otherwise logits are divided by it. In [0, 100].
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set whose probability reaches this share, in (0, 1].
        min_p: drop tokens below this share of the largest probability, in [0, 1].
        repetition_penalty: > 1 makes tokens of prompt and output less likely; 1 is off.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence in the output; in [-2, 2].
        logit_bias: added to the logits of these token ids.
        seed: with the position, the key of the noise; in [0, 2**64).
        max_tokens: emitted tokens at most, >= 1.
        stop: strings that end the output; they are not emitted.
        stop_token_ids: ids that end the output, besides the model's end of sequence.
        ignore_eos: do not end at the model's end of sequence. A structured output then goes on while its form lets it,
            and ends where it is complete.
        logprobs: alternatives reported for each emitted token; None reports nothing.
        prompt_logprobs: the same for each prompt token after the first.
        structured: the form that the output must have; None leaves it free.
        sampler: "keyed" (same tokens with and without speculation) or "ratio" (same distribution).

    Raises:
        ConfigError: a value is out of range or of the wrong type; the message names the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    sampler: SamplerName = "keyed"

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, low=0.0, high=100.0)
        require_int("top_k", self.top_k, low=0, high=MAX_TOP_K)
        require_number("top_p", self.top_p, above=0.0, high=1.0)
        require_number("min_p", self.min_p, low=0.0, high=1.0)
        require_number("repetition_penalty", self.repetition_penalty, above=0.0, high=100.0)
        require_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        require_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        require_int("seed", self.seed, low=0, high=MAX_SEED)
        require_int("max_tokens", self.max_tokens, low=1)
        require_bool("ignore_eos", self.ignore_eos)
        require_choice("sampler", self.sampler, SAMPLERS)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise ConfigError(f"structured must be a StructuredOutput, not {self.structured!r:.80}")
        self._freeze("stop", _as_stop_strings(self.stop))
        self._freeze("stop_token_ids", _as_token_ids(self.stop_token_ids))
        self._freeze("logit_bias", _as_logit_bias(self.logit_bias))

    def _freeze(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def sample(self, number: int) -> "SamplingParams":
        """Parameters of sample `number` (from 0) of several; only the seed differs, see `sample_seed`."""
        return replace(self, seed=sample_seed(self.seed, number))

    @property
    def is_greedy(self) -> bool:
        """True when tokens are the argmax of the filtered logits and no noise is drawn."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when the logits depend on the tokens that came before, beyond the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _as_stop_strings(stop: object) -> tuple[str, ...]:
    """A tuple of non-empty strings; a single string would otherwise be read as its letters."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, tuple | list):
        raise ConfigError(f"stop must be a tuple of strings, not {stop!r}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"stop must hold non-empty strings, not {text!r}")
    return tuple(stop)


def _as_token_ids(token_ids: object) -> tuple[int, ...]:
    if not isinstance(token_ids, tuple | list):
        raise ConfigError(f"stop_token_ids must be a tuple of token ids, not {token_ids!r}")
    for token_id in token_ids:
        require_int("stop_token_ids", token_id, low=0)
    return tuple(token_ids)


def _as_logit_bias(bias: object) -> Mapping[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, not {bias!r}")
    for token_id, value in bias.items():
        require_int("logit_bias token id", token_id, low=0)
        require_number(f"logit_bias of token {token_id}", value, low=-1e4, high=1e4)
    return {int(token_id): float(value) for token_id, value in sorted(bias.items())}


def sample_seed(seed: int, number: int) -> int:
    """The seed of sample `number`: the request's own for the first, then the head of SHA-256("seed/number").

    A plain sum would make sample 1 of seed 5 equal to sample 0 of seed 6.
    """
    if number == 0:
        return seed
    digest = sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - JSON_SEED_BITS)
