"""What a soak run's clients do, and what came of it: answers, refusals, and connections that are closed on purpose."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dspark.bench.serve_client import open_http, require_httpx
from dspark.bench.serve_stream import (
    DONE,
    MalformedStreamError,
    choices_of,
    error_of,
    parse_object,
    read_events,
    text_of,
)
from dspark.bench.soak_mix import DROPPED, LEFT, OK, Act

WRONG, HUNG = "wrong answer", "no answer in time"
_RAW_WAIT_S = 2.0
_FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})


@dataclass
class SampleAnswer:
    """One sample of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of an act.

    Attributes:
        result: "ok", "left", "http 400" and the like, or a kind of failure; right when the act expects it.
        message: of an error, or what is wrong with an answer.
        seconds: until the end.
        samples: of a whole answer.
        num_prompt_tokens, num_tokens, num_cached_tokens: of a whole answer, from its usage.
    """

    act: Act
    result: str
    message: str
    seconds: float
    samples: tuple[SampleAnswer, ...] = ()
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def is_right(self) -> bool:
        """Did what may happen happen?"""
        return self.result in self.act.expected


class _LeftError(Exception):
    """The client has closed its connection, as the act wants."""


@dataclass
class _Reply:
    """An answer as far as it has come."""

    samples: dict[int, SampleAnswer] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Take in a chunk of a stream, whose token ids belong to its only choice, or a whole answer."""
        extension = chunk.get("dspark") or {}
        for choice in choices_of(chunk):
            sample = self.samples.setdefault(int(choice.get("index", 0)), SampleAnswer())
            sample.text += text_of(choice)
            sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
            sample.token_ids += extension.get("token_ids", ())
        for figures in extension.get("choices", ()):
            self.samples.setdefault(int(figures["index"]), SampleAnswer()).token_ids += figures.get("token_ids", ())
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]


class SoakClient:
    """Plays acts against one server.

    Args:
        url: of the server.
        timeout_s: after which a request hangs.
        api_key: sent as a bearer token, or None.

    Raises:
        DSparkError: the HTTP library is not installed.
    """

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        self._httpx = require_httpx()
        self._client = open_http(url, api_key)
        self._address = urlsplit(url)
        self._timeout_s = timeout_s

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def play(self, act: Act) -> Outcome:
        """Do it; whatever happens is the outcome."""
        began, reply = time.perf_counter(), _Reply()
        try:
            async with asyncio.timeout(self._timeout_s):
                result, message = await (self._play_raw(act) if act.is_raw else self._play(act, reply))
        except (TimeoutError, self._httpx.TimeoutException):
            result, message = HUNG, f"nothing for {self._timeout_s:g} s"
        except _LeftError:
            result, message = LEFT, ""
        except (self._httpx.HTTPError, OSError) as error:
            result, message = DROPPED, str(error) or type(error).__name__
        except MalformedStreamError as error:
            result, message = WRONG, str(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            result, message = WRONG, f"the answer has another form: {error!r}"
        seconds = time.perf_counter() - began
        if result == OK and (problem := _problem_of(act, reply)):
            result, message = WRONG, problem
        if result != OK:
            return Outcome(act, result, message, seconds)
        return Outcome(act, OK, "", seconds, tuple(reply.samples[i] for i in sorted(reply.samples)), *_counts(reply))

    async def _play(self, act: Act, reply: _Reply) -> tuple[str, str]:
        playing = asyncio.ensure_future(self._stream(act, reply) if act.is_streamed else self._whole(act, reply))
        seconds = act.leave.seconds if act.leave is not None else None
        try:
            if seconds is not None:
                await asyncio.wait({playing}, timeout=seconds)
                if not playing.done():
                    raise _LeftError
            return await playing
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    def _content(self, act: Act) -> dict[str, Any]:
        if isinstance(act.body, bytes):
            return {"content": act.body, "headers": {"Content-Type": "application/json"}}
        return {"json": act.body}

    async def _whole(self, act: Act, reply: _Reply) -> tuple[str, str]:
        response = await self._client.post(act.path, **self._content(act))
        if response.status_code != 200:
            return _refusal(response.status_code, response.content)
        reply.take(parse_object(response.text))
        return OK, ""

    async def _stream(self, act: Act, reply: _Reply) -> tuple[str, str]:
        most = act.leave.chunks if act.leave is not None else None
        async with self._client.stream("POST", act.path, **self._content(act)) as response:
            if response.status_code != 200:
                return _refusal(response.status_code, await response.aread())
            num_chunks, is_done = 0, False
            async for event in read_events(response.aiter_bytes()):
                if event == DONE:
                    is_done = True
                    break
                chunk = parse_object(event)
                if (message := error_of(chunk)) is not None:
                    return "error in the stream", message
                reply.take(chunk)
                num_chunks += 1
                if num_chunks == most:
                    raise _LeftError
        return (OK, "") if is_done else (DROPPED, "the stream ended without [DONE]")

    async def _play_raw(self, act: Act) -> tuple[str, str]:
        """Send bytes into a socket and see whether the server answers 400 or waits; then go."""
        assert isinstance(act.body, bytes)
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        try:
            writer.write(act.body)
            await writer.drain()
            async with asyncio.timeout(_RAW_WAIT_S):
                line = await reader.readline()
        except TimeoutError:
            return LEFT, ""  # it waits for the rest, which never comes
        finally:
            writer.close()
        words = line.split()
        if not words:
            return LEFT, ""
        return f"http {words[1].decode('ascii', 'replace')}" if len(words) > 1 else WRONG, repr(line[:80])


def _refusal(status: int, content: bytes) -> tuple[str, str]:
    """An error in the API's shape, or the proof that it is not."""
    text = content.decode("utf-8", "replace")
    try:
        error = parse_object(text)["error"]
        if not isinstance(error["message"], str) or "type" not in error:
            raise TypeError
    except (MalformedStreamError, KeyError, TypeError):
        return WRONG, f"status {status} without an error object: {text[:200]}"
    return f"http {status}", error["message"][:300]


def _problem_of(act: Act, reply: _Reply) -> str:
    """What is wrong with a whole answer; "" for nothing."""
    if isinstance(act.body, bytes):
        return ""  # that it was answered at all is what is wrong
    wanted, limit = int(act.body.get("n", 1)), act.body.get("max_tokens")
    if sorted(reply.samples) != list(range(wanted)):
        return f"samples {sorted(reply.samples)} instead of {wanted}"
    _, num_tokens, _ = _counts(reply)
    if num_tokens != sum(len(sample.token_ids) for sample in reply.samples.values()):
        return f"usage counts {num_tokens} tokens, and the answer holds others"
    for index, sample in reply.samples.items():
        if sample.finish_reason not in _FINISH_REASONS:
            return f"sample {index} ends with {sample.finish_reason!r}"
        if limit is not None and len(sample.token_ids) > limit:
            return f"sample {index} has {len(sample.token_ids)} tokens, more than {limit}"
        if limit is not None and sample.finish_reason == "length" and len(sample.token_ids) != limit:
            return f"sample {index} ended for its length with {len(sample.token_ids)} tokens, not {limit}"
        if not act.check(sample.text, sample.finish_reason or ""):
            return f"sample {index} breaks what was asked for: {sample.text[:120]!r}"
    return ""


def _counts(reply: _Reply) -> tuple[int, int, int]:
    """Prompt, completion and cached tokens."""
    usage = reply.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)), int(cached)
