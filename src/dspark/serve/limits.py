"""What every request passes first: its id, its time limit, the size of its body, and the line about it in the log."""

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.serve.errors import ApiError, as_api_error
from dspark.serve.service import Service

_LOG = logging.getLogger("dspark.serve")

# What probes and the page ask every second or so would drown the rest of the log.
_POLLED = frozenset({"/health", "/metrics", "/debug/engine", "/debug/speculation"})
# A client may send any word as a method, and each would be a metric of its own.
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestContext:
    """Gives a request its id, arrival time and deadline; logs and counts its answer. No text of a client is logged.

    Args:
        app: what answers.
        service: settings and metrics.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        arrived_at = time.monotonic()
        deadline = asyncio.get_running_loop().time() + self._service.settings.request_timeout_s
        scope.setdefault("state", {}).update(request_id=request_id, arrived_at=arrived_at, deadline=deadline)
        status = 499

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            path = _route_of(scope)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._service.metrics.answered(method, path, status)
            milliseconds = (time.monotonic() - arrived_at) * 1000
            level = logging.DEBUG if path in _POLLED else logging.INFO
            _LOG.log(level, "%s %s %d %.1f ms %s", method, path, status, milliseconds, request_id)


def _route_of(scope: Scope) -> str:
    """The path of the route that answered: a client's own words would make endless metrics."""
    return str(getattr(scope.get("route"), "path", "other"))


class BodyLimit:
    """Refuses bodies that are too long or arrive too slowly.

    Args:
        app: what answers.
        max_bytes: longest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a body that is counted as it arrives."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "0")
        if not stated.isdecimal() or len(stated) > 15 or int(stated) > self._max_bytes:
            await self._too_long().response()(scope, receive, send)
            return
        deadline, received, is_whole = scope["state"]["deadline"], 0, False

        async def counted() -> Message:
            nonlocal received, is_whole
            if is_whole:
                return await receive()
            async with asyncio.timeout_at(deadline):
                message = await receive()
            received += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if received > self._max_bytes:
                raise self._too_long()
            return message

        try:
            await self._app(scope, counted, send)
        except ApiError as error:
            # Raised past the app's own answers where nothing has been sent yet.
            await as_api_error(error).response()(scope, receive, send)

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body is longer than {self._max_bytes} bytes, which this server takes at most",
            code="body_too_large",
            headers={"Connection": "close"},
        )
