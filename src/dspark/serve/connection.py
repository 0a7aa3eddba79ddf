"""What a connection may send before its request is known: a head of bounded length, in bounded time."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HeadGuard(asyncio.Protocol):
    """Stands before a protocol of uvicorn, which would collect headers as long as they come.

    Attributes:
        max_body_bytes: that may still arrive for a request which was answered before its body had come.
        cycle: uvicorn's request in progress or answered last; None before the first one.
    """

    max_body_bytes = 0
    cycle: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected, and has so long to say what it wants."""
        super().connection_made(transport)
        self._connection = transport
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand bytes on; count those that belong to no request that is being answered."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._num_bytes = 0
            self._stop_timer()
            return
        self._num_bytes += len(data)
        self._start_timer()
        is_unread = self.cycle is not None and self.cycle.more_body
        if self._num_bytes > MAX_HEAD_BYTES + (self.max_body_bytes if is_unread else 0):
            self._refuse()

    def _refuse(self) -> None:
        if not self._connection.is_closing():
            assert isinstance(self._connection, asyncio.WriteTransport)
            self._connection.write(_TOO_LONG)
            self._connection.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._connection.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def guarded_protocol(max_body_bytes: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol behind a guard."""
    return type("GuardedProtocol", (HeadGuard, AutoHTTPProtocol), {"max_body_bytes": max_body_bytes})
