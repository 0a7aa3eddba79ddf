"""A small server that speaks the OpenAI protocol with fixed delays, and that fails in each way on request.

The prompt says what happens: "drop" closes the connection after two chunks, "refuse" answers 500, "error" sends an
error inside the stream, "slow" waits before the first chunk, "garbage" sends no JSON, "silent" answers without text,
"hang" never ends, "nousage" leaves out the usage. Anything else is answered in `CHUNKS` of several tokens. Token ids as
prompt are answered like any text; a request that does not stream gets the same answer in one piece.
"""

import asyncio
import json
import threading
from collections.abc import Sequence

CHUNKS: tuple[tuple[str, tuple[int, ...]], ...] = (("a", (1,)), ("bc", (2, 3)), ("def", (4, 5, 6)), ("g", (7,)))
NUM_TOKENS = 7
FIRST_S, GAP_S, SLOW_S = 0.02, 0.01, 0.15
PROMPT_TOKENS, CACHED_TOKENS = 11, 4
ROUNDS, ACCEPTED_LEN = 3, 2.0


class FakeOpenAI:
    """The server, as a context; `url` is its address.

    Args:
        chunks: texts and token ids of an answer.
        is_dspark: offer what only this package's server offers: token ids, rounds, /debug/engine.
        gap_s: between chunks.
        finish_reason: of every answer.
    """

    def __init__(
        self,
        chunks: Sequence = CHUNKS,
        *,
        is_dspark: bool = False,
        gap_s: float = GAP_S,
        finish_reason: str = "length",
    ) -> None:
        self.chunks, self.is_dspark, self.gap_s, self.finish_reason = chunks, is_dspark, gap_s, finish_reason
        self.bodies: list[dict] = []
        self.most_at_once = 0
        self.drafts = 0
        self.engine = {"num_running": 0, "num_waiting": 0, "num_pages": 8, "num_free_pages": 5, "num_cached_pages": 3}
        self._at_once = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def __enter__(self) -> "FakeOpenAI":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split(" ", 2)
                headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if method == "GET":
                    self._get(path, writer)
                elif path == "/tokenize":
                    _answer(writer, 200, json.dumps({"tokens": list(range(200))}))
                elif not body.startswith(b'{"') or not path.startswith("/v1/c"):
                    _refuse(writer, 400 if path.startswith("/v1/c") else 404)
                else:
                    await self._complete(json.loads(body), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        models = {"data": [{"id": "fake", "max_model_len": 256}]}
        pages = {"/v1/models": json.dumps(models), "/health": '{"status": "ready"}', "/metrics": self._metrics()}
        if self.is_dspark:
            pages["/debug/engine"] = json.dumps(self.engine)
        _answer(writer, 200 if path in pages else 404, pages.get(path, "{}"))

    def _metrics(self) -> str:
        accepted = "vllm:spec_decode_num_accepted_tokens"
        lines = [
            "# HELP x y",
            f"vllm:spec_decode_num_drafts_total {self.drafts}.0",
            f"{accepted}_total {2 * self.drafts}",
        ]
        lines += [f'{accepted}_per_pos_total{{position="{position}"}} {self.drafts}' for position in (0, 1)]
        return "\n".join(lines) + "\n"

    async def _complete(self, body: dict, writer: asyncio.StreamWriter) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.bodies.append(body)
        self.drafts += 1
        try:
            await self._stream(body, writer)
        finally:
            self._at_once -= 1

    async def _stream(self, body: dict, writer: asyncio.StreamWriter) -> None:
        messages = body.get("messages")
        prompt = messages[-1]["content"] if messages else body["prompt"]
        word = prompt.split()[0] if isinstance(prompt, str) and prompt.split() else ""
        if word == "refuse":
            _refuse(writer, 500)
            return
        if not body.get("stream"):
            await asyncio.sleep(FIRST_S)
            _answer(writer, 200, json.dumps(self._whole(messages is not None)))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        _send(writer, ": a comment\n\n")
        _event(writer, _chunk(messages is not None, "", None))
        await writer.drain()
        await asyncio.sleep(SLOW_S if word == "slow" else FIRST_S)
        if word == "garbage":
            _send(writer, "data: {no json\n\n")
        elif word == "error":
            _event(writer, {"error": {"message": "out of memory"}})
        elif word == "hang":
            await asyncio.sleep(60)
        else:
            await self._tokens(body, writer, messages is not None, word)
        _send(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    async def _tokens(self, body: dict, writer: asyncio.StreamWriter, is_chat: bool, word: str) -> None:
        for number, (text, token_ids) in enumerate(() if word == "silent" else self.chunks):
            if number:
                await asyncio.sleep(self.gap_s)
            if word == "drop" and number == 2:
                writer.close()
                raise ConnectionError
            chunk = _chunk(is_chat, text, None)
            if self.is_dspark and body.get("stream_origins"):
                chunk["dspark"] = {"token_ids": list(token_ids)}
            _event(writer, chunk)
            await writer.drain()
        _event(writer, _chunk(is_chat, "", self.finish_reason))
        if word != "nousage":
            _event(writer, self._closing())

    def _whole(self, is_chat: bool) -> dict:
        text = "".join(text for text, _ in self.chunks)
        choice = {"message": {"content": text}} if is_chat else {"text": text}
        closing = self._closing()
        token_ids = [token_id for _, token_ids in self.chunks for token_id in token_ids]
        figures = {"dspark": {"choices": [{"index": 0, "token_ids": token_ids}]}} if self.is_dspark else {}
        return {**closing, **figures, "choices": [{"index": 0, **choice, "finish_reason": self.finish_reason}]}

    def _closing(self) -> dict:
        num_tokens = sum(len(token_ids) for _, token_ids in self.chunks)
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num_tokens}
        chunk: dict = {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS}}}
        if self.is_dspark:
            chunk["dspark"] = {"rounds": ROUNDS, "accepted_len": ACCEPTED_LEN}
        return chunk


def _chunk(is_chat: bool, text: str, finish_reason: str | None) -> dict:
    content = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"choices": [{"index": 0, **content, "finish_reason": finish_reason}], "usage": None}


def _event(writer: asyncio.StreamWriter, value: dict) -> None:
    _send(writer, f"data: {json.dumps(value)}\r\n\r\n")


def _send(writer: asyncio.StreamWriter, text: str) -> None:
    content = text.encode()
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


def _refuse(writer: asyncio.StreamWriter, status: int) -> None:
    _answer(writer, status, json.dumps({"error": {"message": "no", "type": "invalid_request_error"}}))


def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    content = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
