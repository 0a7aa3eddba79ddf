"""The app: endpoints, and what each request passes on its way to them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from dspark.serve import chat, completions, health, tokens
from dspark.serve.auth import ApiKeys
from dspark.serve.errors import install_error_answers
from dspark.serve.limits import BodyLimit, RequestContext
from dspark.serve.served_engine import ServedEngine
from dspark.serve.service import make_service
from dspark.serve.settings import ServerSettings
from dspark.serve.site import mount_page


def create_app(engine: ServedEngine, settings: ServerSettings) -> FastAPI:
    """An app over an engine; it starts the engine, drains it and shuts it down with its own life.

    Raises:
        DSparkError: a setting does not fit the engine.
    """
    service = make_service(engine, settings)

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.drain(settings.drain_s)
            await engine.shutdown()

    app = FastAPI(lifespan=live, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    for endpoints in (completions, chat, tokens, health):
        app.include_router(endpoints.router)
    mount_page(app)
    install_error_answers(app)
    # The last one added is the first one passed.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestContext, service=service)
    return app
