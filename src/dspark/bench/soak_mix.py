"""The requests of a soak run: a seeded stream of what clients do to a server, each with what may come of it."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.bench.serve_client import CHAT, COMPLETIONS
from dspark.config.errors import DSparkError

OK, LEFT, DROPPED = "ok", "left", "dropped"
# A server under more load than it takes says so, and the client is to come back later.
BUSY = frozenset({"http 429", "http 503"})
_ANSWERED = frozenset({OK}) | BUSY
_LEFT = frozenset({LEFT, OK}) | BUSY
_STOPS = (" the", "\n", ".", "e", ", and", "ing ", "0", " = ")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_CHOICES = ("alpha", "beta", "alphabet")
_REGEX = "[a-f]{2,6}-[0-9]{1,3}"


@dataclass(frozen=True)
class Leave:
    """When a client closes its connection: after so many chunks, or so many seconds after sending."""

    chunks: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Act:
    """One thing that a client does.

    Attributes:
        number: in the stream; keys what is random about it.
        kind: for counting.
        path, body: what is sent; bytes are sent as they are.
        expected: results that are right.
        is_comparable: its tokens are a function of the request alone, so that they can be compared.
        leave: the client goes before the end.
        is_raw: the bytes go into a socket as they are, without HTTP.
        check: of each answered text; False for a wrong one.
    """

    number: int
    kind: str
    path: str
    body: Mapping[str, Any] | bytes
    expected: frozenset[str]
    is_comparable: bool = False
    leave: Leave | None = None
    is_raw: bool = False
    check: Callable[[str, str], bool] = field(default=lambda text, reason: True, compare=False)

    @property
    def is_streamed(self) -> bool:
        """Does it ask for events?"""
        return isinstance(self.body, Mapping) and bool(self.body.get("stream"))


@dataclass(frozen=True)
class MixSettings:
    """What the stream is made of.

    Args:
        seed: of everything random.
        vocabulary: token ids to draw prompts from.
        max_model_len: tokens of a request at most.
        max_body_bytes: longest body that the server takes; None sends no longer ones.
        texts: prompts as text.
        dialogues: prompts as messages; empty where the model does not chat.
        has_structured: the server has a grammar library.
        model: the served name.
    """

    seed: int
    vocabulary: Sequence[int]
    max_model_len: int
    texts: Sequence[str]
    model: str
    max_body_bytes: int | None = None
    dialogues: Sequence[Sequence[Mapping[str, str]]] = ()
    has_structured: bool = True

    def __post_init__(self) -> None:
        if self.max_model_len < 64:
            raise DSparkError(f"a soak run needs a server with max_model_len of at least 64, not {self.max_model_len}")


class Mix:
    """Makes acts by number: the same number and settings give the same act.

    Args:
        settings: what they are made of.
    """

    def __init__(self, settings: MixSettings) -> None:
        self._settings = settings
        shared = random.Random(settings.seed)
        quarter = settings.max_model_len // 4
        self._prefixes = [self._tokens(shared, shared.randint(quarter * 2 // 3, quarter * 4 // 3)) for _ in range(2)]
        weights: dict[Callable[[int, random.Random], Act], int] = {
            self._completion: 22,
            self._shared_prefix: 20,
            self._long: 18,
            self._samples: 8,
            self._stop_strings: 8,
            self._penalties: 6,
            self._short: 4,
            self._leave_stream: 10,
            self._leave_early: 6,
            self._too_long: 2,
            self._malformed: 3,
            self._raw: 2,
        }
        if settings.dialogues:
            weights[self._chat] = 8
        if settings.has_structured:
            weights[self._structured] = 6
        if settings.max_body_bytes is not None:
            weights[self._oversized] = 1
        self._makers, self._weights = list(weights), list(weights.values())

    def act(self, number: int) -> Act:
        """The act of a number."""
        own = random.Random(f"{self._settings.seed}/{number}")
        (maker,) = own.choices(self._makers, self._weights)
        return maker(number, own)

    def _tokens(self, own: random.Random, count: int) -> list[int]:
        return own.choices(self._settings.vocabulary, k=count)

    def _body(self, number: int, own: random.Random, **fields: Any) -> dict[str, Any]:
        """What requests of every kind share; half of them are streamed, some ask for log-probabilities."""
        body: dict[str, Any] = {
            "model": self._settings.model,
            "seed": number,
            "temperature": own.choice((0, 0, 0.7, 1.0)),
            "max_tokens": own.randint(4, 48),
            "stream_origins": True,
            **fields,
        }
        if own.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if own.random() < 0.15:
            body |= {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
        return body

    def _answered(self, number: int, kind: str, body: dict[str, Any], **more: Any) -> Act:
        path = CHAT if "messages" in body else COMPLETIONS
        return Act(number, kind, path, body, _ANSWERED, is_comparable=True, **more)

    def _prompt(self, own: random.Random, most: int | None = None) -> str | list[int]:
        if self._settings.texts and own.random() < 0.4:
            return own.choice(self._settings.texts)
        return self._tokens(own, own.randint(1, most or self._settings.max_model_len // 3))

    def _completion(self, number: int, own: random.Random) -> Act:
        return self._answered(number, "completion", self._body(number, own, prompt=self._prompt(own)))

    def _chat(self, number: int, own: random.Random) -> Act:
        messages = list(own.choice(self._settings.dialogues))
        return self._answered(number, "chat", self._body(number, own, messages=messages))

    def _shared_prefix(self, number: int, own: random.Random) -> Act:
        prefix = own.choice(self._prefixes)
        length = own.choice((len(prefix), own.randint(1, len(prefix))))
        prompt = prefix[:length] + self._tokens(own, own.randint(0, 12))
        return self._answered(number, "shared prefix", self._body(number, own, prompt=prompt))

    def _long(self, number: int, own: random.Random) -> Act:
        """Outputs that grow over many pages, so that pages run out."""
        room = self._settings.max_model_len
        prompt = self._tokens(own, own.randint(1, room // 6))
        body = self._body(number, own, prompt=prompt, ignore_eos=True)
        return self._answered(number, "long", body | {"max_tokens": own.randint(room // 4, room * 5 // 8)})

    def _samples(self, number: int, own: random.Random) -> Act:
        body = self._body(number, own, prompt=self._prompt(own), n=own.randint(2, 4))
        return self._answered(number, "n > 1", body | {"temperature": 1.0})

    def _stop_strings(self, number: int, own: random.Random) -> Act:
        stops = own.sample(_STOPS, own.randint(1, 3))
        body = self._body(number, own, prompt=self._prompt(own), stop=stops)
        return self._answered(
            number, "stop strings", body, check=lambda text, reason: not any(stop in text for stop in stops)
        )

    def _penalties(self, number: int, own: random.Random) -> Act:
        fields: dict[str, Any] = {"temperature": own.choice((0, 0.8))}
        fields |= own.choice(({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}))
        fields |= own.choice(({"frequency_penalty": 0.4}, {"repetition_penalty": 1.2}, {}))
        fields |= own.choice(({"logit_bias": {str(own.choice(self._settings.vocabulary)): 3.0}}, {}))
        body = self._body(number, own, prompt=self._prompt(own))
        return self._answered(number, "filters and penalties", body | fields)

    def _short(self, number: int, own: random.Random) -> Act:
        body = self._body(number, own, prompt=self._prompt(own))
        return self._answered(number, "few tokens", body | {"max_tokens": own.randint(1, 3)})

    def _structured(self, number: int, own: random.Random) -> Act:
        kind = own.choice(("json", "regex", "choice"))
        constraints: dict[str, dict[str, Any]] = {
            "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
            "regex": {"structured_outputs": {"regex": _REGEX}},
            "choice": {"structured_outputs": {"choice": list(_CHOICES)}},
        }
        body = self._body(number, own, prompt=self._prompt(own, 40)) | constraints[kind] | {"max_tokens": 64}
        return self._answered(
            number, f"structured {kind}", body, check=lambda text, reason: reason != "stop" or _is_as_asked(kind, text)
        )

    def _leave_stream(self, number: int, own: random.Random) -> Act:
        body = self._body(number, own, prompt=self._prompt(own), n=own.choice((1, 1, 2)))
        body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64}
        leave = Leave(chunks=own.randint(1, 8))
        return Act(number, "leaves a stream", COMPLETIONS, body, _LEFT, leave=leave)

    def _leave_early(self, number: int, own: random.Random) -> Act:
        """While the request waits, during its prefill or a verify, streamed or not."""
        body = self._body(number, own, prompt=self._prompt(own), n=own.choice((1, 1, 3))) | {"max_tokens": 64}
        leave = Leave(seconds=own.choice((0.0, own.uniform(0, 0.05), own.uniform(0, 1.0))))
        return Act(number, "leaves early", COMPLETIONS, body, _LEFT, leave=leave)

    def _too_long(self, number: int, own: random.Random) -> Act:
        prompt = self._tokens(own, self._settings.max_model_len + own.randint(0, 50))
        body = self._body(number, own, prompt=prompt)
        return Act(number, "prompt too long", COMPLETIONS, body, frozenset({"http 400"}))

    def _oversized(self, number: int, own: random.Random) -> Act:
        assert self._settings.max_body_bytes is not None
        content = b'{"prompt": "' + b"x" * (self._settings.max_body_bytes + own.randint(0, 5000)) + b'"}'
        # A server may answer and close before it has read all of it.
        return Act(number, "body too large", COMPLETIONS, content, frozenset({"http 413", DROPPED}))

    def _malformed(self, number: int, own: random.Random) -> Act:
        path, content, status = own.choice(_MALFORMED)
        return Act(number, "malformed", path, content, frozenset({f"http {status}"}))

    def _raw(self, number: int, own: random.Random) -> Act:
        body = json.dumps(self._body(number, own, prompt=[1, 2, 3])).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
        content = own.choice(
            (
                own.randbytes(own.randint(1, 400)),
                b"GET / HTTP/new\r\n\r\n",
                head[: own.randint(1, len(head))],
                head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2],
                head + b"Content-Length: -4\r\n\r\n",
                head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            )
        )
        return Act(number, "no HTTP", "", content, frozenset({LEFT, "http 400"}), is_raw=True)


_MALFORMED: tuple[tuple[str, bytes, int], ...] = (
    (COMPLETIONS, b"", 400),
    (COMPLETIONS, b"{", 400),
    (COMPLETIONS, b"[]", 400),
    (COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400),
    (COMPLETIONS, b'{"prompt": []}', 400),
    (COMPLETIONS, b'{"prompt": [-1]}', 400),
    (COMPLETIONS, b'{"prompt": [99999999]}', 400),
    (COMPLETIONS, b'{"prompt": "a", "max_tokens": -1}', 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": -1}', 400),
    (COMPLETIONS, b'{"prompt": "a", "n": 0}', 400),
    (COMPLETIONS, b'{"prompt": "a", "colour": 1}', 400),
    (COMPLETIONS, b'{"prompt": "a", "model": "no such model"}', 404),
    (COMPLETIONS, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "nobody", "content": 1}]}', 400),
    ("/v1/nothing", b"{}", 404),
)


def _is_as_asked(kind: str, text: str) -> bool:
    """Does a structured answer that came to its end keep to its constraint?"""
    if kind == "choice":
        return text in _CHOICES
    if kind == "regex":
        head, _, digits = text.partition("-")
        return 2 <= len(head) <= 6 and set(head) <= set("abcdef") and 1 <= len(digits) <= 3 and digits.isdecimal()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and set(value) == {"name", "size"}
