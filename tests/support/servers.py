"""Servers for tests: an app without a network, and one on the loopback in a thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from dspark.engine.async_engine import AsyncEngine
from dspark.serve.app import create_app
from dspark.serve.run import DrainingServer, address_of, make_server, open_socket
from dspark.serve.settings import ServerSettings
from support.fake_loop import FakeLoop, fake_assembly

SETTINGS = {"served_model_names": ("straw",)}


@asynccontextmanager
async def straw_client(loop: FakeLoop | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app over a fake loop, in this event loop and without a network."""
    chosen = ServerSettings(**{**SETTINGS, **settings})
    engine = AsyncEngine.over(fake_assembly(loop), max_waiting=chosen.max_waiting)
    app = create_app(engine, chosen)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://straw") as client:
        client.engine = engine  # type: ignore[attr-defined]
        yield client


def with_client(
    work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]], loop: FakeLoop | None = None, **settings: Any
) -> Any:
    """Run an async function with such a client."""

    async def run() -> Any:
        async with straw_client(loop, **settings) as client:
            return await work(client)

    return asyncio.run(run())


def post(path: str, body: Any, loop: FakeLoop | None = None, headers: Any = None, **settings: Any) -> httpx.Response:
    """One POST; bytes go as they are, anything else as JSON."""

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        if isinstance(body, bytes):
            return await client.post(
                path, content=body, headers={"Content-Type": "application/json", **(headers or {})}
            )
        return await client.post(path, json=body, headers=headers)

    response: httpx.Response = with_client(work, loop, **settings)
    return response


@dataclass
class LiveServer:
    """A server on the loopback.

    Attributes:
        url: its address.
        engine: behind it.
        event_loop: that it runs in, in another thread.
        thread: ends with it.
    """

    url: str
    engine: AsyncEngine
    server: DrainingServer
    event_loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def drain(self) -> None:
        """What a signal does."""
        self.event_loop.call_soon_threadsafe(self.server.begin_drain)


@contextmanager
def live_server(engine: AsyncEngine, **settings: Any) -> Iterator[LiveServer]:
    """Serve on a free port of the loopback until the context is left."""
    chosen = ServerSettings(**{**SETTINGS, "port": 0, "drain_s": 5.0, **settings})
    listening = open_socket(chosen.host, chosen.port, chosen.request_timeout_s)
    server = make_server(create_app(engine, chosen), engine, chosen)
    found: list[asyncio.AbstractEventLoop] = []
    is_ready = threading.Event()

    async def run() -> None:
        found.append(asyncio.get_running_loop())
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        is_ready.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert is_ready.wait(10)
    live = LiveServer(address_of(listening, chosen.host), engine, server, found[0], thread)
    try:
        yield live
    finally:
        if thread.is_alive():
            live.drain()
        thread.join(15)
        listening.close()
        assert not thread.is_alive(), "the server has not ended"


def events_of(text: str) -> list[Any]:
    """The messages of a stream of events; the last one must be [DONE], which is left out."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [httpx.Response(200, text=line).json() for line in lines[:-1]]
