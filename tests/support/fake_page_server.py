"""What the page talks to, without an engine: replies of known rounds, and every failure on request.

The question says what happens: "fail" answers 400, "busy" 429, "break" closes the connection in the middle, "complain"
ends the stream with an error, "slow" takes 50 ms a round, "think" thinks first, "call" calls a tool, "markup" replies
with HTML. Anything else is answered by `REPLY`.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import dspark.serve

PAGE = Path(dspark.serve.__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Rounds: verify_len, and the texts of the tokens, the last of which is the model's own.
REPLY = [
    (0, ["The"]),
    (5, [" sea", " is", " wide", " and"]),
    (5, [" blue", ","]),
    (3, [" caf", "é", " tables", " by"]),
    (5, [" the"]),
    (5, [" shore", ".\n", "It", " never", " sl", "eeps"]),
    (2, ["."]),
]
LONG = REPLY + [(5, [" Waves", " come", " and"]), (5, [" go", " and", " come", " again"])] * 12
ACCEPTANCE = {
    "block_size": 5,
    "rounds": 1200,
    "emitted_tokens": 4010,
    "accepted_len": {"value": 3.34, "low": 3.27, "high": 3.41},
    "wasted_rows": {"value": 0.31, "low": 0.3, "high": 0.32},
    "verified": [1150, 1100, 1010, 860, 700],
    "accepted": [960, 760, 560, 340, 190],
    "verify_lens": [50, 50, 90, 150, 160, 700],
}
ENGINE = {
    "state": "ready",
    "reason": None,
    "num_requests": 3,
    "num_running": 2,
    "num_waiting": 1,
    "num_pages": 256,
    "num_free_pages": 150,
    "num_cached_pages": 66,
    "num_steps": 4321,
    "num_preemptions": 4,
    "last_step_rows": 14,
    "last_verify_rows": 10,
    "page_usage": 0.15,
    "prefix": {"lookups": 90, "hits": 40, "prompt_tokens": 9000, "cached_tokens": 5600},
    "speculation": "running",
    "acceptance": ACCEPTANCE,
}


class FakePageServer:
    """The server, as a context; `url` is its address.

    Args:
        key: API key that every request of the page has to carry.
        chats: whether the model has a chat format.
        engine: what /debug/engine says besides, or instead of, `ENGINE`.
        reply: rounds of every reply.
    """

    def __init__(
        self, *, key: str = "", chats: bool = True, engine: dict | None = None, reply: list | None = None
    ) -> None:
        self.key, self.chats, self.reply = key, chats, REPLY if reply is None else reply
        self.engine = ENGINE | (engine or {})
        self.bodies: list[dict] = []
        self.num_cut = 0
        fake = self

        class Handler(_Handler):
            server_state = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> "FakePageServer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def wait_cut(self, number: int, seconds: float = 5.0) -> bool:
        """Whether clients have closed so many streams before their ends."""
        end = time.monotonic() + seconds
        while self.num_cut < number and time.monotonic() < end:
            time.sleep(0.02)
        return self.num_cut >= number


class _Handler(BaseHTTPRequestHandler):
    server_state: FakePageServer
    protocol_version = "HTTP/1.0"  # one request a connection, so that a server that ends is gone at once

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self):
        path = self.path.split("?")[0]
        if path == "/" or path.startswith("/page/"):
            return self._send_file(PAGE / ("index.html" if path == "/" else Path(path).name))
        if path == "/health":
            return self._send_json(200, {"status": self.server_state.engine["state"], "reason": None})
        if not self._has_key():
            return None
        if path == "/debug/engine":
            return self._send_json(200, self.server_state.engine)
        if path == "/v1/models":
            return self._send_json(200, {"data": [{"id": "tiny-model", "max_model_len": 4096}]})
        return self._fail(404, "there is no such path on this server")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            return None
        if "messages" in body and not self.server_state.chats:
            return self._fail(400, "this model continues text and does not chat")
        if self.path == "/tokenize":
            return self._send_json(200, {"count": 3, "tokens": [1, 2, 3]})
        self.server_state.bodies.append(body)
        question = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if "fail" in question:
            return self._fail(400, "max_tokens must be at least 1, and it is 0")
        if "busy" in question:
            return self._fail(429, "as many requests wait as the engine queues", {"Retry-After": "7"})
        return self._stream(question, is_chat="messages" in body)

    def _has_key(self) -> bool:
        key = self.server_state.key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._fail(401, "a valid API key is needed: send it as Authorization: Bearer KEY")
            return False
        return True

    def _stream(self, question: str, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in _events(question, self.server_state.reply, is_chat=is_chat):
                if event is None:
                    return
                if "slow" in question:
                    time.sleep(0.05)
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server_state.num_cut += 1

    def _send_file(self, file: Path) -> None:
        if not file.is_file():
            return self._fail(404, "there is no such path on this server")
        return self._send(
            200, file.read_bytes(), f"{KINDS[file.suffix]}; charset=utf-8", {"Content-Security-Policy": POLICY}
        )

    def _fail(self, status: int, message: str, headers: dict | None = None) -> None:
        self._send_json(status, {"error": {"message": message, "type": "x", "param": None, "code": None}}, headers)

    def _send_json(self, status: int, value: object, headers: dict | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", headers)

    def _send(self, status: int, content: bytes, kind: str, headers: dict | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _events(question: str, reply: list, *, is_chat: bool):
    """The events of a reply; None where the connection breaks."""
    rounds = list(reply)
    if "markup" in question:
        rounds = [(0, ["<b>"]), (2, ["<img src=x", " onerror=alert(1)>", "&amp;"])]
    if "think" in question:
        rounds = [(0, ["Hm"]), (3, [" so", ".", "</think>"]), *rounds]
    yield _chunk({"role": "assistant", "content": ""}, is_chat)
    next_id, is_thinking, num_accepted = 10, "think" in question, 0
    for number, (verify_len, texts) in enumerate(rounds):
        if number == 3 and "break" in question:
            yield None
        if number == 3 and "complain" in question:
            yield {"error": {"message": "the engine met its end", "type": "server_error", "param": None, "code": None}}
            return
        text = "".join(texts)
        deltas = [{"content": text}]
        if is_thinking:
            thoughts, mark, answer = text.partition("</think>")
            deltas = [{"reasoning_content": thoughts}] + ([{"content": answer}] if answer else [])
            is_thinking = not mark
        pieces = [_chunk(delta, is_chat) for delta in deltas]
        accepted = len(texts) - 1
        num_accepted += accepted
        pieces[-1]["dspark"] = {
            "token_ids": list(range(next_id, next_id + len(texts))),
            "token_texts": texts,
            "origins": [True] * accepted + [False],
            "verify_len": verify_len,
        }
        next_id += len(texts)
        yield from pieces
    if "call" in question:
        begin = {"index": 0, "id": "c", "type": "function", "function": {"name": "look_up", "arguments": ""}}
        yield _chunk({"tool_calls": [begin]}, is_chat)
        for part in ('{"word": ', '"sea"}'):
            yield _chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]}, is_chat)
    last = _chunk({}, is_chat)
    last["choices"][0]["finish_reason"] = "stop"
    last["dspark"] = {"rounds": len(rounds), "accepted_len": 1 + num_accepted / len(rounds), "num_cached_tokens": 6}
    yield last
    yield {"choices": [], "usage": {"prompt_tokens": 14, "completion_tokens": next_id - 10}}


def _chunk(delta: dict, is_chat: bool) -> dict:
    choice = {"index": 0, "finish_reason": None}
    return {"choices": [choice | ({"delta": delta} if is_chat else {"text": delta.get("content", "")})]}
