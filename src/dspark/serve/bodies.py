"""Request bodies: bytes to JSON to a checked model, with a sentence for whatever is wrong on the way."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar, get_args

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from dspark.serve.errors import ApiError, bad_request

Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 64
# Bytes that are parsed in a few milliseconds.
_LONG_BODY = 256 * 1024
_JSON_TYPES = ("application/json", "text/json")
# Tags that pydantic puts into the place of an error where a field is a union; they are no part of the request.
_UNION_TAGS = ("list[", "function-", "constrained-", "nullable", "union[", "tagged-")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SCALAR_TAGS = frozenset({"str", "int", "float", "bool", "dict", "literal"})


def json_body(model: type[Model]) -> Callable[[Request], Awaitable[Model]]:
    """A dependency that reads the body of a request as one model."""

    async def read(request: Request) -> Model:
        _require_json(request)
        try:
            body = await request.body()
        except ClientDisconnect:
            raise bad_request("the client closed the connection before the whole body had arrived") from None
        if len(body) < _LONG_BODY:
            return parse_body(model, body)
        return await asyncio.to_thread(parse_body, model, body)

    return read


def parse_body(model: type[Model], body: bytes) -> Model:
    """Check a body.

    Raises:
        ApiError: 400, naming the place and what is wrong there.
    """
    value = _parse_json(body)
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_kind_of(value)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _as_api_error(model, error) from None


def _require_json(request: Request) -> None:
    given = request.headers.get("content-type", "application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"the body is encoded as {coding!r:.80}: send it as it is", code="unsupported_media_type")
    kind = given.split(";", 1)[0].strip().lower()
    if kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise ApiError(
            415, f"the content type must be application/json, not {given!r:.80}", code="unsupported_media_type"
        )


def _parse_json(body: bytes) -> Any:
    if not body.strip():
        raise bad_request("the body is empty: send a JSON object", code="invalid_json")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_utf8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_as_object)
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}", code="invalid_json"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # an integer with more digits than Python reads
        raise bad_request(f"the body holds a number that is too long ({error})"[:200], code="invalid_json") from None
    _require_shallow(value)
    if _SURROGATE.search(text):
        _require_characters(value)
    return value


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON's object; of a key that comes twice one value would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise bad_request(f"the body holds the key {twice!r:.80} twice in one object", code="invalid_json")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise bad_request(f"the body holds {word}, which is no JSON number", code="invalid_json")


def _require_shallow(value: Any) -> None:
    """What recurses over the body later must not be led arbitrarily deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _require_characters(value: Any) -> None:
    """JSON can spell halves of surrogate pairs, which no text in UTF-8 can hold, answers neither."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = str(error.object)[error.start]
        raise bad_request(
            f"the body holds \\u{ord(half):04x}, half of a surrogate pair, which is no character", code="invalid_json"
        ) from None


def _too_deep() -> ApiError:
    return bad_request(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _as_api_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    """The first thing that is wrong; unknown fields first, since they often explain the others."""
    found = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")[0]
    place = [part for part in found["loc"] if not _is_union_tag(part)]
    param = _as_path(place) or None
    if found["type"] == "extra_forbidden":
        known = _fields_at(model, place[:-1])
        near = get_close_matches(str(place[-1]), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return bad_request(f"unknown field {param:.200}{hint}", param=param, code="unknown_field")
    if found["type"] == "missing":
        return bad_request(f"{param} is missing", param=param, code="missing_field")
    message = str(found["msg"])
    message = message.removeprefix("Value error, ")
    value = "" if isinstance(found["input"], dict | list) else f", not {found['input']!r:.60}"
    if found["type"] == "value_error":
        return bad_request(message, param=param)
    return bad_request(f"{param or 'the body'}: {message[:1].lower()}{message[1:]}{value}", param=param)


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and (part in _SCALAR_TAGS or part.startswith(_UNION_TAGS) or part[:1].isupper())


def _as_path(place: list[int | str]) -> str:
    """messages[0].content"""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _fields_at(model: type[BaseModel], place: list[int | str]) -> list[str]:
    """Names that are known at a place, followed through the models' annotations."""
    models = [model]
    for part in place:
        if isinstance(part, str):
            models = [
                found
                for one in models
                if part in one.model_fields
                for found in _models_in(one.model_fields[part].annotation)
            ]
    return sorted({name for one in models for name in one.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]


def _kind_of(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
