"""One streamed request to an OpenAI-compatible server and everything that was seen of it.

The HTTP library is an optional package; this is the only file of the benchmarks that imports it.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from dspark.bench.serve_stream import (
    DONE,
    MalformedStreamError,
    choices_of,
    error_of,
    parse_object,
    read_events,
    text_of,
    tokens_of,
)
from dspark.config.errors import DSparkError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ERROR_LEN = 300
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class LoadRequest:
    """What is sent.

    Args:
        number: place among the measured requests; the same on both sides of a comparison.
        name: of its prompt.
        path: `COMPLETIONS` or `CHAT`.
        body: the JSON object, without model, streaming and usage, which the client adds.
    """

    number: int
    name: str
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class RequestRecord:
    """What was seen of one request; moments are seconds of `time.perf_counter`.

    Attributes:
        due, sent: when it should have been sent, and when it was.
        ended: when the stream ended or failed.
        arrivals: (moment, tokens) of each chunk with text or tokens; tokens is None where the server does not say.
        last: moment of the last chunk with text, tokens or a finish reason.
        error: kind of failure, or None; `message` says more.
        prompt_tokens, completion_tokens, cached_tokens: from the server's usage.
        rounds, accepted_tokens: speculative rounds and what they emitted, where the server says so.
        text, token_ids: the output; token ids where the server offers them.
    """

    number: int
    name: str
    due: float
    sent: float
    ended: float
    arrivals: tuple[tuple[float, int | None], ...] = ()
    last: float | None = None
    error: str | None = None
    message: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    rounds: int | None = None
    accepted_tokens: float | None = None
    text: str = ""
    token_ids: tuple[int, ...] | None = None


@dataclass
class _Answer:
    """A stream as far as it has come.

    Args:
        offers_token_ids: the server names the tokens of its chunks. The ids of one emission may follow its text in
            a chunk of their own; the moment of the text is theirs.
    """

    offers_token_ids: bool = False
    arrivals: list[tuple[float, int | None]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    has_token_ids: bool = False
    early: float | None = None
    last: float | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    extension: Mapping[str, Any] | None = None
    is_done: bool = False

    def take(self, chunk: Mapping[str, Any], now: float) -> None:
        """Take in one chunk of the stream."""
        text = "".join(text_of(choice) for choice in choices_of(chunk))
        token_ids = tokens_of(chunk)
        if token_ids is not None:
            self.has_token_ids = True
            self.token_ids += token_ids
        if text or token_ids:
            self._arrive(now, token_ids)
            self.texts.append(text)
            self.last = now
        for choice in choices_of(chunk):
            if choice.get("finish_reason"):
                self.finish_reason, self.last = str(choice["finish_reason"]), now
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        if isinstance(chunk.get("dspark"), dict):
            self.extension = {**(self.extension or {}), **chunk["dspark"]}

    def _arrive(self, now: float, token_ids: tuple[int, ...] | None) -> None:
        """Note that text or tokens have come."""
        if not self.offers_token_ids:
            self.arrivals.append((now, None))
        elif not token_ids:
            self.early = now if self.early is None else self.early
        else:
            self.arrivals.append((now if self.early is None else self.early, len(token_ids)))
            self.early = None


class ServeClient:
    """Sends requests to one server.

    Args:
        url: of the server, without /v1.
        model: the served model's name.
        timeout_s: for a whole request.
        api_key: sent as a bearer token, or None.
        wants_token_ids: ask for the token ids of each chunk; only `dspark serve` knows the field.

    Raises:
        DSparkError: the HTTP library is not installed.
    """

    def __init__(
        self, url: str, model: str, timeout_s: float, api_key: str | None = None, *, wants_token_ids: bool = False
    ) -> None:
        self.url, self.model, self.timeout_s, self.wants_token_ids = url, model, timeout_s, wants_token_ids
        self._httpx = require_httpx()
        self._client = open_http(url, api_key)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def get_text(self, path: str) -> str | None:
        """The body of a page; None where there is none."""
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._client.get(path)
        except (self._httpx.HTTPError, TimeoutError):
            return None
        return str(response.text) if response.status_code == 200 else None

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Status and JSON value of an answer that is not streamed; (0, None) without an answer."""
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._client.post(path, json=body)
            return response.status_code, response.json()
        except (self._httpx.HTTPError, TimeoutError, ValueError):
            return 0, None

    async def send(self, request: LoadRequest, due: float) -> RequestRecord:
        """Stream one answer; a failure is a record with an error, not an exception."""
        answer, sent = _Answer(self.wants_token_ids), time.perf_counter()
        error, message = await self._outcome(request, answer)
        return _as_record(request, answer, (due, sent, time.perf_counter()), error, message)

    async def _outcome(self, request: LoadRequest, answer: _Answer) -> tuple[str | None, str]:
        """Kind and message of the failure, or (None, "")."""
        httpx = self._httpx
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._stream(request, answer)
        except (TimeoutError, httpx.TimeoutException):
            return "timeout", f"no complete answer within {self.timeout_s:g} s"
        except httpx.ConnectError as error:
            return "connect", str(error)
        except httpx.HTTPError as error:
            return "dropped", str(error) or type(error).__name__
        except MalformedStreamError as error:
            return "malformed", str(error)

    async def _stream(self, request: LoadRequest, answer: _Answer) -> tuple[str | None, str]:
        body = {**request.body, "model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.wants_token_ids:
            body["stream_origins"] = True
        async with self._client.stream("POST", request.path, json=body) as response:
            if response.status_code != 200:
                content = (await response.aread()).decode("utf-8", "replace")
                return f"http {response.status_code}", content[:_ERROR_LEN]
            async for event in read_events(response.aiter_bytes()):
                now = time.perf_counter()
                if event == DONE:
                    answer.is_done = True
                    break
                chunk = parse_object(event)
                if (message := error_of(chunk)) is not None:
                    return "server error in the stream", message[:_ERROR_LEN]
                answer.take(chunk, now)
        return _missing(answer)


def _missing(answer: _Answer) -> tuple[str | None, str]:
    """What a stream that ended without an error still lacks."""
    if answer.finish_reason is None:
        return "dropped", "the stream ended without a finish reason"
    if answer.usage is None:
        return "no usage", "the server sent no usage, so tokens cannot be counted"
    if not answer.arrivals:
        return "empty", "the answer held no text"
    return None, ""


def _as_record(
    request: LoadRequest, answer: _Answer, moments: tuple[float, float, float], error: str | None, message: str
) -> RequestRecord:
    due, sent, ended = moments
    usage, extension = answer.usage or {}, answer.extension or {}
    rounds, accepted_len = extension.get("rounds"), extension.get("accepted_len")
    if not (isinstance(rounds, int) and rounds > 0 and isinstance(accepted_len, int | float)):
        rounds = accepted_len = None
    return RequestRecord(
        number=request.number,
        name=request.name,
        due=due,
        sent=sent,
        ended=ended,
        arrivals=tuple(answer.arrivals),
        last=answer.last,
        error=error,
        message=message,
        finish_reason=answer.finish_reason,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
        rounds=rounds,
        accepted_tokens=None if rounds is None or accepted_len is None else rounds * accepted_len,
        text="".join(answer.texts),
        token_ids=tuple(answer.token_ids) if answer.has_token_ids else None,
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def open_http(url: str, api_key: str | None) -> Any:
    """An asynchronous HTTP client of one server, with as many connections as are asked for.

    Raises:
        DSparkError: the HTTP library is not installed.
    """
    httpx = require_httpx()
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # No limit of its own: a pool that makes requests wait would hide the server's answer to the load.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # A proxy of the environment has no business on the loopback.
    trust_env = urlsplit(url).hostname not in _LOOPBACK
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits, trust_env=trust_env)


def require_httpx() -> ModuleType:
    """The HTTP library.

    Raises:
        DSparkError: it is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise DSparkError("this benchmark needs httpx: install it with pip install 'dspark[serve]'") from error
    return httpx
