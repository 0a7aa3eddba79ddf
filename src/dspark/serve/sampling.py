"""From a request to the sampling parameters of its samples; whatever is asked for is honoured or refused by name."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from dspark.config.errors import ConfigError
from dspark.config.sampling import JSON_SEED_BITS, SamplingParams
from dspark.config.structured import StructuredOutput
from dspark.serve.errors import bad_request
from dspark.serve.protocol import NEUTRAL_VALUES, ChatRequest, CompletionRequest, GenerationRequest

# OpenAI's default for completions; a chat goes on up to the context.
DEFAULT_COMPLETION_TOKENS = 16


def completion_params(request: CompletionRequest) -> list[SamplingParams]:
    """Parameters of the n samples of each prompt. max_tokens 0 only scores the prompt: one token is drawn and dropped.

    Raises:
        ApiError, ConfigError: a field is out of range or not offered; the message names it.
    """
    refuse_unsupported(request)
    if request.best_of is not None and request.best_of != request.num_samples:
        raise bad_request(
            f"best_of is {request.best_of} and n is {request.num_samples}: choosing among more samples than are "
            "returned is not supported, leave best_of out",
            "best_of",
        )
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    settings = _shared_settings(request)
    settings["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        settings["prompt_logprobs"] = request.logprobs
    return _samples(request, settings, max(limit, 1))


def chat_params(request: ChatRequest, room: int, grammar: str | None = None) -> list[SamplingParams]:
    """Parameters of the n samples of a chat.

    Args:
        request: the request.
        room: tokens that the context still holds after the prompt, at least 1.
        grammar: that the chat format sets for the reply; the request itself sets none then.
    Raises:
        ApiError, ConfigError: a field is out of range or not offered; the message names it.
    """
    refuse_unsupported(request)
    if request.parallel_tool_calls is False and request.tools:
        raise bad_request(
            "parallel_tool_calls: false is not supported: the model decides how many calls it makes",
            "parallel_tool_calls",
        )
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise bad_request(
            f"max_tokens is {request.max_tokens} and max_completion_tokens is {request.max_completion_tokens}: "
            "they mean the same, give one of them",
            "max_completion_tokens",
        )
    limit = request.max_completion_tokens or request.max_tokens or room
    settings = _shared_settings(request)
    settings["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    if grammar is not None:
        settings["structured"] = StructuredOutput.grammar(grammar)
    return _samples(request, settings, limit)


def is_constrained(request: GenerationRequest) -> bool:
    """Whether the text has to follow a grammar."""
    return _structured(request) is not None


def refuse_unsupported(request: GenerationRequest) -> None:
    """Refuse what is known and not offered, unless its value changes nothing."""
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(request, name, None)
        if not any(value == same and type(value) is type(same) for same in neutral):
            raise bad_request(f"{name} is not supported by this server: leave it out", name, "unsupported_field")


def _samples(request: GenerationRequest, settings: dict[str, Any], max_tokens: int) -> list[SamplingParams]:
    seed = secrets.randbits(JSON_SEED_BITS) if request.seed is None else request.seed
    params = SamplingParams(**settings, max_tokens=max_tokens, seed=seed)
    return [params.sample(number) for number in range(request.num_samples)]


def _shared_settings(request: GenerationRequest) -> dict[str, Any]:
    """Fields of SamplingParams; those that the client left out take the API's defaults."""
    given = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": request.top_p,
        "top_k": _top_k(request.top_k),
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": _logit_bias(request.logit_bias),
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "sampler": request.sampler,
        "structured": _structured(request),
    }
    settings = {name: value for name, value in given.items() if value is not None}
    return {**settings, "ignore_eos": request.ignore_eos}


def _top_k(top_k: int | None) -> int | None:
    """-1 is another spelling of "all"."""
    return 0 if top_k == -1 else top_k


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """Token ids are JSON strings here, since JSON has no other keys."""
    if not bias:
        return None
    wrong = [key for key in bias if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key)]
    if wrong:
        raise bad_request(
            f"logit_bias must map token ids to numbers, and {wrong[0]!r:.40} is no token id", "logit_bias"
        )
    return {int(key): value for key, value in bias.items()}


def _structured(request: GenerationRequest) -> StructuredOutput | None:
    """The one constraint on the text, under whichever of its names it was given."""
    found = [*_of_response_format(request), *_of_structured_outputs(request), *_of_guided(request)]
    if len(found) > 1:
        raise bad_request(f"{found[0][0]} and {found[1][0]} both constrain the text: give one of them", found[1][0])
    if not found:
        return None
    name, kind, value = found[0]
    if kind == "choice" and not value:
        raise bad_request(f"{name} is empty: give at least one text to choose from", name)
    try:
        return StructuredOutput(kind, tuple(value) if kind == "choice" else value)
    except ConfigError as error:
        raise bad_request(f"{name}: {error}", name) from None


def _of_response_format(request: GenerationRequest) -> list[tuple[str, Any, Any]]:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        return [("response_format", "json_object", "")]
    return [("response_format", "json_schema", json.dumps(wanted.json_schema.schema_))]


def _of_structured_outputs(request: GenerationRequest) -> list[tuple[str, Any, Any]]:
    wanted = request.structured_outputs
    if wanted is None:
        return []
    constraints = {
        "json_schema": _as_text(wanted.json_),
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "json_object": "" if wanted.json_object else None,
    }
    return [("structured_outputs", kind, value) for kind, value in constraints.items() if value is not None]


def _of_guided(request: GenerationRequest) -> list[tuple[str, Any, Any]]:
    constraints = [
        ("guided_json", "json_schema", _as_text(request.guided_json)),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
        ("guided_grammar", "grammar", request.guided_grammar),
    ]
    return [constraint for constraint in constraints if constraint[2] is not None]


def _as_text(schema: dict[str, Any] | str | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, dict) else schema
