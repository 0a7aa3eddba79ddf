"""The requests of a serving benchmark: from the package's prompts, a file of prompts, or random tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from typing import Any

import numpy as np

from dspark.bench.prompts import DOMAINS, BenchPrompt, load_prompts
from dspark.bench.serve_client import CHAT, COMPLETIONS, LoadRequest, ServeClient
from dspark.config.errors import DSparkError

ENDPOINTS = ("auto", "completions", "chat")
_MIN_POOL = 64


@dataclass(frozen=True)
class LengthRange:
    """Token counts, drawn uniformly from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, words: str, name: str) -> "LengthRange":
        """Read "128" or "64:256".

        Raises:
            DSparkError: it is neither, or not 1 <= low <= high.
        """
        low, _, high = words.partition(":")
        try:
            length = cls(int(low), int(high or low))
        except ValueError:
            length = cls(0, 0)
        if not 1 <= length.low <= length.high:
            raise DSparkError(f"{name} takes a number of tokens or LOW:HIGH, such as 128 or 64:256, not {words!r}")
        return length


@dataclass(frozen=True)
class RequestSettings:
    """What every request of a run shares.

    Args:
        max_tokens: tokens to generate at most; `output_len` goes before it.
        output_len: generate exactly so many tokens, past the end of sequence; None leaves the end to the model.
        input_len: prompts of so many random tokens instead of texts; None sends texts.
        temperature, seed: sampling; request number i has the seed `seed + i`.
        endpoint: one of `ENDPOINTS`; "auto" sends dialogues to the chat endpoint and texts to completions.
    """

    max_tokens: int
    output_len: LengthRange | None = None
    input_len: LengthRange | None = None
    temperature: float = 0.0
    seed: int = 0
    endpoint: str = "auto"


def read_prompt_file(text: str, name: str) -> list[BenchPrompt]:
    """Prompts of a JSON Lines file: {"turns": [text ...]} asks the first turn, {"messages": [...]}, {"prompt": text}.

    Args:
        text: of the file.
        name: of the file, for errors and the names of prompts.

    Raises:
        DSparkError: a line holds no prompt; names it.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise DSparkError(f"{name} holds no prompt: it takes one JSON object a line")
    return [_read_line(number, line, name) for number, line in lines]


def _read_line(number: int, line: str, name: str) -> BenchPrompt:
    try:
        record = json.loads(line)
        texts: list[Any] = [record[key] for key in ("prompt", "text") if key in record]
        if texts:
            return _checked(BenchPrompt("file", f"{name}-{number}", name, "of the file", text=texts[0]))
        messages = record["messages"] if "messages" in record else [{"role": "user", "content": record["turns"][0]}]
        return _checked(BenchPrompt("file", f"{name}-{number}", name, "of the file", messages=tuple(messages)))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise DSparkError(f"{name}, line {number}: no prompt with turns, messages, prompt or text ({error})") from error


def _checked(prompt: BenchPrompt) -> BenchPrompt:
    if prompt.text is not None and not isinstance(prompt.text, str):
        raise TypeError("the prompt is not a string")
    if any(not isinstance(message, dict) or "role" not in message for message in prompt.messages):
        raise TypeError("a message is not an object with a role")
    return prompt


def mixed_domains(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The first prompt of each domain, then the second of each ..., so that few requests already are of all kinds."""
    domains = {prompt.domain: [other for other in prompts if other.domain == prompt.domain] for prompt in prompts}
    rounds = zip_longest(*domains.values())
    return [prompt for round_of_domains in rounds for prompt in round_of_domains if prompt is not None]


def text_requests(prompts: Sequence[BenchPrompt], count: int, settings: RequestSettings) -> list[LoadRequest]:
    """So many requests, the prompts again and again in their order.

    Raises:
        DSparkError: a dialogue is to be sent to the completions endpoint.
    """
    lengths = _output_lens(count, settings)
    chosen = islice(cycle(prompts), count)
    return [
        LoadRequest(number, prompt.name, *_addressed(prompt, settings.endpoint, _shared(number, length, settings)))
        for number, (prompt, length) in enumerate(zip(chosen, lengths, strict=True))
    ]


def _addressed(prompt: BenchPrompt, endpoint: str, shared: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Endpoint and body."""
    if prompt.text is None:
        if endpoint == "completions":
            raise DSparkError(f"the prompt {prompt.name} is a dialogue: send it with --endpoint chat or auto")
        return CHAT, {"messages": list(prompt.messages), **shared}
    if endpoint == "chat":
        return CHAT, {"messages": [{"role": "user", "content": prompt.text}], **shared}
    return COMPLETIONS, {"prompt": prompt.text, **shared}


async def random_requests(client: ServeClient, count: int, settings: RequestSettings) -> list[LoadRequest]:
    """Prompts of random tokens, drawn from those that the server's tokenizer makes of the package's texts.

    So they are ordinary tokens of the served model, whichever it is, and need no tokenizer here.

    Raises:
        DSparkError: random tokens are to be sent as chat, or the server cannot tokenize.
    """
    assert settings.input_len is not None
    if settings.endpoint == "chat":
        raise DSparkError("random tokens cannot be sent as a chat message: leave out --endpoint chat or --input-len")
    pool = await _token_pool(client)
    random = np.random.default_rng(settings.seed)
    sizes = random.integers(settings.input_len.low, settings.input_len.high + 1, count)
    prompts = [pool[random.integers(0, len(pool), size)].tolist() for size in sizes]
    return [
        LoadRequest(number, f"random-{number}", COMPLETIONS, {"prompt": prompt, **_shared(number, length, settings)})
        for number, (prompt, length) in enumerate(zip(prompts, _output_lens(count, settings), strict=True))
    ]


async def _token_pool(client: ServeClient) -> np.ndarray:
    text = "\n".join(prompt.text for prompt in load_prompts(DOMAINS) if prompt.text is not None)
    status, answer = await client.post("/tokenize", {"model": client.model, "prompt": text})
    tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
    if not isinstance(tokens, list) or len(set(tokens)) < _MIN_POOL:
        raise DSparkError(
            f"--input-len needs a server with /tokenize, and {client.url} answered with status {status}: "
            "send texts instead"
        )
    return np.unique(np.asarray(tokens, dtype=np.int64))


def _output_lens(count: int, settings: RequestSettings) -> list[int | None]:
    if settings.output_len is None:
        return [None] * count
    random = np.random.default_rng(settings.seed + 1)
    return [int(size) for size in random.integers(settings.output_len.low, settings.output_len.high + 1, count)]


def _shared(number: int, output_len: int | None, settings: RequestSettings) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": output_len or settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed + number,
    }
    if output_len is not None:
        body["ignore_eos"] = True
    return body
