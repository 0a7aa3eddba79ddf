"""Server-sent events, and the end of the work when the client has gone."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

from dspark.serve.errors import ApiError

_LOG = logging.getLogger("dspark.serve")

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
# A stream notices its own time limit and says so; a client that does not read even that is cut off a little later.
_GRACE_S = 5.0


def event(message: dict[str, Any]) -> bytes:
    """One event."""
    return (
        b"data: " + json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
    )


class EventStream(StreamingResponse):
    """A response of events.

    Args:
        events: ends by itself; is stopped when the client disconnects or stops reading.
        close: called once the response has ended, however it ends.
        deadline: time of the event loop at which `events` ends by itself.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], deadline: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close
        self._deadline = deadline

    async def stream_response(self, send: Send) -> None:
        """Send the events while the client takes them."""
        try:
            async with asyncio.timeout_at(self._deadline + _GRACE_S):
                await super().stream_response(send)
        except TimeoutError:
            _LOG.warning("a stream was cut off at its time limit: the client does not read it")
        finally:
            self._close()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do work for a client that has sent its whole body, and stop when it closes the connection.

    Raises:
        ApiError: the client has gone; nobody will read the answer.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client closed the connection", kind="server_error", code="client_closed")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
