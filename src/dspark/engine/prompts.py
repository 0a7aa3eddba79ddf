"""What callers hand in as prompts and sampling parameters: told apart, checked, and turned into token ids."""

from collections.abc import Sequence
from operator import index
from typing import Any

from dspark.config import SamplingParams
from dspark.config.errors import ConfigError
from dspark.engine.tokenizer import TextTokenizer

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) or several, as a list of prompts.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = _as_items(prompts, "prompts are")
    is_one = bool(listed) and not any(isinstance(item, str | Sequence) for item in listed)
    return [listed] if is_one else listed


def prompt_token_ids(tokenizer: TextTokenizer, prompt: Prompt) -> list[int]:
    """Token ids of one prompt.

    Raises:
        ConfigError: it is neither text nor token ids, or a text that UTF-8 cannot hold.
    """
    if not isinstance(prompt, str):
        return [_as_token_id(item) for item in _as_items(prompt, "a prompt is")]
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the prompt is not valid text: its character {error.start} is half of a surrogate pair"
        ) from None
    return tokenizer.encode(prompt)


def as_params(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Sampling parameters of each prompt: the defaults, the same for all, or one each.

    Raises:
        ConfigError: their number is another, or one is of another type.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    listed = list(params) if isinstance(params, Sequence) else [params]
    for item in listed:
        if not isinstance(item, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, one or a list, not {type(item).__name__}")
    if len(listed) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts were given with {len(listed)} sampling parameters: give one each")
    return listed


def _as_items(value: Any, name: str) -> list[Any]:
    """The items of a sequence or an array; bytes and single numbers are none."""
    if not isinstance(value, str | bytes | bytearray) and hasattr(value, "__len__"):
        try:
            return list(value)
        except TypeError:  # an array without dimensions
            pass
    raise ConfigError(f"{name} text or a list of token ids, not {type(value).__name__}")


def _as_token_id(item: Any) -> int:
    """A plain int of any integer, also of one in an array."""
    if not isinstance(item, bool):
        try:
            return index(item)
        except TypeError:
            pass
    raise ConfigError(f"a prompt's token ids are integers, not {item!r:.80}")
