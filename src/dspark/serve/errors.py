"""Errors as clients of the OpenAI API expect them: a status, and {"error": {message, type, param, code}}."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dspark.config.errors import DSparkError
from dspark.engine.async_engine import EngineBusyError, EngineDrainingError
from dspark.engine.loop_thread import EngineDeadError

_LOG = logging.getLogger("dspark.serve")

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of the HTTP response.
        message: one sentence for the user.
        kind: OpenAI's `type`.
        param: the field of the request that is at fault.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The response as JSON; also what a stream ends with."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The response itself."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client can put it right."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException, timeout_s: float | None = None) -> ApiError:
    """The answer for whatever was raised; what nobody foresaw is logged and told without its details."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    match error:
        case ApiError():
            return error
        case EngineBusyError():
            return ApiError(429, str(error), kind="rate_limit_error", code="engine_busy", headers=retry)
        case EngineDrainingError():
            return ApiError(503, str(error), kind="server_error", code="shutting_down", headers=retry)
        case EngineDeadError():
            return ApiError(503, str(error), kind="server_error", code="engine_dead")
        case DSparkError():
            return bad_request(str(error), param=_param_of(str(error)))
        case TimeoutError():
            limit = "its time limit" if timeout_s is None else f"{timeout_s:g} s"
            return ApiError(408, f"the request was ended after {limit}", kind="timeout_error", code="request_timeout")
        case HTTPException():
            return _of_http(error)
    _LOG.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request", kind="server_error", code="internal_error")


def _of_http(error: HTTPException) -> ApiError:
    """Answers of the framework: no such path, wrong method."""
    phrase = HTTPStatus(error.status_code).phrase
    messages = {404: "there is no such path on this server", 405: "this path does not take this method"}
    message = messages.get(error.status_code, str(error.detail or phrase))
    code = phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _param_of(sentence: str) -> str | None:
    """The field that a sentence of the configuration begins with: "top_p must be ..."."""
    first = sentence.split(" ", 1)[0]
    return first if first.isidentifier() and ("_" in first or first in _FIELDS) else None


_FIELDS = frozenset({"temperature", "seed", "stop", "logprobs", "sampler", "messages", "prompt"})


def install_error_answers(app: FastAPI) -> None:
    """Answer every error of an app in one shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    for kind in (ApiError, DSparkError, EngineDeadError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """A part of the request besides its body does not fit."""
    return bad_request("the request does not fit this path").response()
