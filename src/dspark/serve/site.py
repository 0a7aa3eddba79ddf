"""The page for people: its files as they are, under a policy that lets nothing else run in it."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.datastructures import MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Guarded:
    """Adds the page's headers to the answers of an app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, answer)


def mount_page(app: FastAPI) -> None:
    """Serve / and the files below /page/, where the package has them."""
    index = FOLDER / "index.html"
    if not index.is_file():
        return

    async def show_index() -> FileResponse:
        return FileResponse(index, headers=_HEADERS)

    app.add_api_route("/", show_index, include_in_schema=False)
    app.mount("/page", _Guarded(StaticFiles(directory=FOLDER)))
