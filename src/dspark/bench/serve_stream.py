"""What a streamed answer of an OpenAI-compatible server says: events out of bytes, and fields out of events."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

DONE = "[DONE]"
_DELTA_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


class MalformedStreamError(Exception):
    """The server sent something that is no server-sent event with a JSON object."""


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event, as soon as its blank line is there.

    Lines end with LF or CR LF. Comments and other fields are skipped; several data lines of an event are joined.
    """
    pending, lines = b"", list[str]()
    async for chunk in chunks:
        *complete, pending = (pending + chunk).split(b"\n")
        for raw in complete:
            line = _decode(raw.removesuffix(b"\r"))
            if line:
                lines.append(line)
                continue
            if event := _event_of(lines):
                yield event
            lines = []
    if event := _event_of([*lines, _decode(pending)]):
        yield event


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedStreamError("a line is not UTF-8") from error


def _event_of(lines: list[str]) -> str:
    return "\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:"))


def parse_object(event: str) -> dict[str, Any]:
    """The JSON object of an event.

    Raises:
        MalformedStreamError: it is something else.
    """
    try:
        value = json.loads(event)
    except (ValueError, RecursionError) as error:
        raise MalformedStreamError(f"an event is not JSON: {event[:80]!r}") from error
    if not isinstance(value, dict):
        raise MalformedStreamError(f"an event is not a JSON object: {event[:80]!r}")
    return value


def choices_of(chunk: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The choices of a chunk of either endpoint."""
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield choice


def text_of(choice: Mapping[str, Any]) -> str:
    """Generated text of a choice: of a completion, or of a reply with its reasoning and tool calls."""
    if "text" in choice:
        return str(choice["text"] or "")
    delta = choice.get("delta", choice.get("message"))
    if not isinstance(delta, dict):
        return ""
    texts = [value for name in _DELTA_TEXTS if isinstance(value := delta.get(name), str)]
    for call in delta.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, dict) else {}
        texts += [value for name in ("name", "arguments") if isinstance(value := function.get(name), str)]
    return "".join(texts)


def tokens_of(chunk: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Token ids of a chunk, where the server offers them (`stream_origins` of `dspark serve`)."""
    extension = chunk.get("dspark")
    token_ids = extension.get("token_ids") if isinstance(extension, dict) else None
    if not isinstance(token_ids, list):
        return None
    return tuple(int(token_id) for token_id in token_ids)


def error_of(chunk: Mapping[str, Any]) -> str | None:
    """The message of an error that arrives inside a stream; None where there is none."""
    error = chunk.get("error")
    if error is None:
        return None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
