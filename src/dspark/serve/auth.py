"""API keys: one of them must come with every request, where the server has any."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dspark.serve.errors import ApiError

# A prober has no key, and a person's browser loads the page before it can send one.
OPEN_PATHS = frozenset({"/health", "/"})
OPEN_FOLDER = "/page/"


class ApiKeys:
    """Lets a request pass that carries `Authorization: Bearer KEY`.

    Args:
        app: what answers.
        keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: send it as Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)

    def _is_known(self, headers: Headers) -> bool:
        """Every key is compared in full, so that the time tells nothing about any of them."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = [hmac.compare_digest(given.strip().encode("utf-8", "replace"), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(found)
