"""A server from start to end: listening, and the signals that end it."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator

import uvicorn
from fastapi import FastAPI

from dspark.config.errors import DSparkError
from dspark.serve.app import create_app
from dspark.serve.connection import guarded_protocol
from dspark.serve.served_engine import ServedEngine
from dspark.serve.settings import ServerSettings

_LOG = logging.getLogger("dspark.serve")

# Once the engine has ended its requests, their last bytes need this long at most.
_LAST_BYTES_S = 5


class DrainingServer(uvicorn.Server):
    """A server that a signal makes drain: it goes on answering while its requests end, then leaves with success.

    Args:
        config: of uvicorn.
        engine: to drain.
        drain_s: seconds for which requests may go on.
    """

    def __init__(self, config: uvicorn.Config, engine: ServedEngine, drain_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals in the event loop; unlike uvicorn's own way, none is raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.begin_drain)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def begin_drain(self) -> None:
        """Take no more requests, and leave when those that run have ended; a second call does not wait for them."""
        if self._draining is None:
            _LOG.info("shutting down: requests that run have %g s", self._drain_s)
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        if not await self._engine.drain(self._drain_s):
            _LOG.warning("the requests that still ran after %g s were ended", self._drain_s)
        self.should_exit = True


def open_socket(host: str, port: int, unread_s: float | None = None) -> socket.socket:
    """A socket that listens.

    Args:
        host, port: where; port 0 takes a free one.
        unread_s: seconds after which the kernel gives up a connection whose client takes nothing; where it can.
    Raises:
        DSparkError: the address is unknown or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if unread_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it. Without it, what was written to such a client would be kept for ever.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(unread_s * 1000), 2**31 - 1))
        listening.bind(address)
    except OSError as error:
        raise DSparkError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """The address for people and programs."""
    port = listening.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, engine: ServedEngine, settings: ServerSettings) -> DrainingServer:
    """A server for an app, which the caller runs."""
    config = uvicorn.Config(
        app,
        http=guarded_protocol(settings.max_body_bytes),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_LAST_BYTES_S,
        lifespan="on",
    )
    return DrainingServer(config, engine, settings.drain_s)


def serve(engine: ServedEngine, settings: ServerSettings, on_listening: Callable[[str], None]) -> None:
    """Serve until a signal ends it.

    Args:
        engine: not started yet.
        settings: of the server.
        on_listening: called with the address once clients can connect.
    Raises:
        DSparkError: it cannot listen there.
    """
    listening = open_socket(settings.host, settings.port, settings.request_timeout_s)
    server = make_server(create_app(engine, settings), engine, settings)
    address = address_of(listening, settings.host)

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            # What was made so far stays: walking through it again would stop every stream for a moment.
            gc.collect()
            gc.freeze()
            on_listening(address)
        await serving

    with listening:
        asyncio.run(run())
