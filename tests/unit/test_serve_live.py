"""A server on the loopback: disconnects, slow readers, draining and signals, as sockets and processes see them."""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from dspark.engine.async_engine import AsyncEngine
from support.fake_loop import FakeLoop, failing_at, fake_assembly, sleeping
from support.servers import events_of, live_server

COMPLETIONS = "/v1/completions"
LONG = "the quick brown fox " * 12


def straw_loop(**settings):
    return FakeLoop(reply_to=lambda prompt_ids, seed: f"{bytes(prompt_ids[1:]).decode()}: {LONG}", **settings)


@contextlib.contextmanager
def serving(loop, **settings):
    with live_server(AsyncEngine.over(fake_assembly(loop)), **settings) as server:
        yield server


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head_of(length):
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def open_stream(url, prompt="a", stream=True, receive_bytes=None, **fields):
    """Send a request over a socket of its own, which buffers that many bytes of the answer."""
    body = json.dumps({"prompt": prompt, "max_tokens": 2000, "stream": stream, **fields}).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    connection.sendall(head_of(len(body)) + body)
    return connection


def complete(url, prompt, stream=False):
    response = httpx.post(
        f"{url}{COMPLETIONS}", json={"prompt": prompt, "max_tokens": 2000, "stream": stream}, timeout=30
    )
    assert response.status_code == 200
    if not stream:
        return response.json()["choices"][0]["text"]
    return "".join(choice["text"] for event in events_of(response.text) for choice in event["choices"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_socket_aborts_its_request_and_changes_no_other(stream):
    loop = straw_loop(before_step=sleeping(0.03))
    with serving(loop) as server:
        texts = []
        other = threading.Thread(target=lambda: texts.append(complete(server.url, "other")))
        other.start()
        wait_until(lambda: len(loop.requests) == 1)
        leaving = open_stream(server.url, "leaving", stream=stream)
        wait_until(lambda: len(loop.requests) == 2)
        if stream:
            assert b"200 OK" in leaving.recv(1000)
        leaving.close()
        wait_until(lambda: len(loop.requests) == 1)
        other.join()
        assert texts == [f"other: {LONG}"]
        wait_until(lambda: server.engine.status().num_requests == 0)
        status = server.engine.status().loop
        assert (status.num_running, status.num_waiting, status.num_free_pages) == (0, 0, status.num_pages)
        assert (
            'request_aborted_total{model_name="straw",reason="disconnect"} 1.0'
            in httpx.get(f"{server.url}/metrics").text
        )


def test_a_storm_of_disconnects_leaves_nothing_behind():
    loop = straw_loop(before_step=sleeping(0.001))
    with serving(loop) as server:
        for round_number in range(4):
            connections = [open_stream(server.url, f"{number}", stream=number % 2 == 0) for number in range(25)]
            time.sleep(0.005 * round_number)
            for connection in connections:
                connection.close()
        wait_until(lambda: not loop.requests and server.engine.status().num_requests == 0)
        assert complete(server.url, "after") == f"after: {LONG}"


def test_many_streams_at_once_each_get_their_own_text():
    loop = straw_loop()

    async def one(client, number):
        body = {"prompt": f"p{number}", "max_tokens": 2000, "stream": number % 2 == 0}
        response = await client.post(COMPLETIONS, json=body)
        if not body["stream"]:
            return response.json()["choices"][0]["text"]
        return "".join(choice["text"] for event in events_of(response.text) for choice in event["choices"])

    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    with serving(loop) as server:
        texts = asyncio.run(main(server.url))
    assert texts == [f"p{number}: {LONG}" for number in range(64)]


def test_a_reader_that_does_not_read_delays_nobody_and_is_cut_off(monkeypatch):
    monkeypatch.setattr("dspark.serve.streaming._GRACE_S", 0.1)
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: LONG * 10, max_model_len=10**4, accepted=5)
    with serving(loop, request_timeout_s=0.5) as server:
        slow = open_stream(server.url, "slow", max_tokens=2400, logprobs=64, receive_bytes=4096)
        wait_until(lambda: loop.submitted)
        assert httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "b", "max_tokens": 9}).status_code == 200
        assert any(prompt_ids[1:] == list(b"slow") for _, prompt_ids, _ in loop.submitted)
        time.sleep(0.7)
        slow.settimeout(30)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := slow.recv(65536):
                received += chunk
        assert b"[DONE]" not in received
        slow.close()


def test_a_body_that_never_comes_is_given_up():
    with serving(straw_loop(), request_timeout_s=0.2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head_of(100) + b'{"prompt"')
            connection.settimeout(5)
            assert b" 408 " in connection.recv(200)


def test_a_dead_engine_ends_every_stream_with_an_error():
    fail = failing_at(0)
    loop = straw_loop(
        before_step=lambda step: fail(step) if len(loop.submitted) == 8 else time.sleep(0.05), max_num_seqs=3
    )

    async def one(client, number):
        return await client.post(COMPLETIONS, json={"prompt": "p", "max_tokens": 2000, "stream": number % 2 == 0})

    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            answers = await asyncio.gather(*(one(client, number) for number in range(8)))
            return answers, await client.get("/health")

    with serving(loop) as server:
        answers, health = asyncio.run(main(server.url))
    assert health.status_code == 503
    for number, answer in enumerate(answers):
        assert "engine_dead" in answer.text
        assert answer.status_code == (200 if number % 2 == 0 else 503)


def test_draining_ends_streams_with_their_last_token_and_refuses_others():
    loop = straw_loop(before_step=sleeping(0.01))
    with serving(loop) as server:
        texts = []
        reader = threading.Thread(target=lambda: texts.append(complete(server.url, "a", stream=True)))
        reader.start()
        wait_until(lambda: loop.requests)
        server.drain()
        wait_until(lambda: server.engine.status().state == "draining")
        refused = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "b"})
        assert (refused.status_code, httpx.get(f"{server.url}/health").status_code) == (503, 503)
        reader.join()
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert texts == [f"a: {LONG}"]


def test_draining_has_a_time_limit():
    loop = straw_loop(before_step=sleeping(0.1))
    with serving(loop, drain_s=0.2) as server:
        stream = open_stream(server.url)
        wait_until(lambda: loop.requests)
        server.drain()
        stream.settimeout(10)
        received = b""
        while chunk := stream.recv(4096):
            received += chunk
        assert b"shutting_down" in received
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_the_connection_is_kept_for_the_next_request():
    with serving(straw_loop()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port))
        for _ in range(3):
            connection.request("POST", COMPLETIONS, b"{", {"Content-Type": "application/json"})
            assert connection.getresponse().read().startswith(b'{"error"')
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_with_success(number):
    program = "from dspark.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--max-model-len", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        url = line.split()[-1]
        assert process.stdout.readline().strip() == "speculation: running"
        body = {"prompt": "def f(", "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{url}{COMPLETIONS}", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 12
        process.send_signal(number)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in log
    assert "def f(" not in log


@pytest.mark.parametrize("head", [b"X-A: " + b"a" * 2**20, b"X-A: b\r\n" * 2**17, b"GET /" + b"a" * 2**20])
def test_a_head_without_an_end_is_refused(head):
    """Whether it is one header or many; the server must not collect it."""
    with serving(straw_loop()) as server, connect(server.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" if not head.startswith(b"GET") else b"")
        with contextlib.suppress(OSError):
            for start in range(0, len(head), 4096):
                connection.sendall(head[start : start + 4096])
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(4096)
            assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
            assert connection.recv(4096) == b""
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_connection_that_says_nothing_or_half_a_head_is_closed(monkeypatch):
    """Also after an answer; one whose answer takes long is not."""
    monkeypatch.setattr("dspark.serve.connection.HEAD_TIMEOUT_S", 0.3)
    loop = straw_loop(before_step=sleeping(0.01))
    with serving(loop) as server, connect(server.url) as silent, connect(server.url) as half:
        half.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += half.recv(4096)
        half.sendall(b"GET /hea")
        began = time.monotonic()
        assert complete(server.url, "a") == f"a: {LONG}"
        assert time.monotonic() - began > 0.3
        assert silent.recv(10) == b""
        assert half.recv(10) == b""


def test_an_answer_before_the_end_of_the_body_reaches_its_client():
    with serving(straw_loop(), api_keys=("key",)) as server:
        body = b"a" * 2**20
        for _ in range(2):
            answer = httpx.post(f"{server.url}{COMPLETIONS}", content=body)
            assert answer.status_code == 401


def test_requests_of_one_connection_are_answered_in_their_order():
    """Sent all at once, in either version of HTTP and either way to tell a body's length."""
    body = b'{"prompt": "a", "max_tokens": 4, "seed": 1}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    whole = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    last = whole.replace(b"HTTP/1.1", b"HTTP/1.0")
    with serving(straw_loop()) as server, connect(server.url) as connection:
        connection.sendall(whole + chunked + whole + chunked + last)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    assert received.count(b"HTTP/1.1 200") == 5
    assert received.count(b'"text":"a: t"') == 5
