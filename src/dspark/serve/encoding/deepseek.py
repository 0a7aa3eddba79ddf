"""The chat format of releases that ship an encoder instead of a template; what differs between them is a `Dialect`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from dspark.config.errors import DSparkError
from dspark.serve.encoding import dialects
from dspark.serve.encoding.dialects import Dialect
from dspark.serve.encoding.dsml import DsmlParser
from dspark.serve.encoding.forced import call_grammar
from dspark.serve.encoding.messages import Call, ChatMessage, is_forced, offered_tools, read_messages, require_text
from dspark.serve.encoding.protocol import (
    ChatEncoding,
    Effort,
    Message,
    PromptPiece,
    ReplyParser,
    Tool,
    ToolChoice,
)

_TOKENS_IN_TEXT = re.compile(f"({'|'.join(map(re.escape, (dialects.MARK, dialects.THINK, dialects.THINK_END)))})")


class DeepSeekEncoding(ChatEncoding):
    """Messages in one dialect.

    A forced call (tool_choice "required" or a named function) begins inside the block of calls, which the prompt opens
    and `reply_grammar` carries to its end; the model was not trained to think there, so it needs thinking turned off.
    Of a schema the names of its properties are enforced; the rest, "strict" or not, is given to the model as written.

    Args:
        dialect: the release's.
    """

    supports_tools = True
    supports_reasoning = True

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def pieces(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: Effort | None = None,
        thinking: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> tuple[PromptPiece, ...]:
        """See ChatEncoding."""
        thinks = _resolve_thinking(thinking, reasoning_effort)
        offered = offered_tools(tools, tool_choice)
        forced = _check_forced(tool_choice, thinks)
        # Earlier thoughts are shown again only to a model that works with tools.
        shows_thoughts = thinks and bool(offered)
        effort = self._dialect.effort_text(reasoning_effort) if thinks else ""
        head = _join(_tools_text(self._dialect, offered), _format_text(self._dialect, response_format))
        pieces = [
            _token(dialects.BEGIN),
            *self._systems_and_turns(effort, head, read_messages(messages), shows_thoughts),
            *self._reply_start(thinks, forced),
        ]
        return require_text(pieces)

    def parser(
        self,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: Effort | None = None,
        thinking: bool | None = None,
    ) -> ReplyParser:
        """See ChatEncoding."""
        thinks = _resolve_thinking(thinking, reasoning_effort)
        offered = offered_tools(tools, tool_choice)
        forced = _check_forced(tool_choice, thinks)
        return DsmlParser(self._dialect, thinks=thinks, takes_calls=bool(offered), starts_in_calls=forced)

    def reply_grammar(
        self,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: Effort | None = None,
        thinking: bool | None = None,
    ) -> str | None:
        """See ChatEncoding: a forced call is one, and nothing but calls comes with it."""
        return call_grammar(self._dialect, offered_tools(tools, tool_choice)) if is_forced(tool_choice) else None

    def _systems_and_turns(
        self, effort: str, head: list[PromptPiece], messages: list[ChatMessage], shows_thoughts: bool
    ) -> Iterator[PromptPiece]:
        """The system texts with what the request adds to them, and the turns in their order."""
        spoken = [message for message in messages if message.role != "system" or message.content]
        if self._dialect.has_system_token:
            first, rest = (spoken[:1], spoken[1:]) if spoken and spoken[0].role == "system" else ([], spoken)
        else:
            first = [message for message in spoken if message.role == "system"]
            rest = [message for message in spoken if message.role != "system"]
        opening = [_plain(effort + "\n\n".join(message.content for message in first)), *head]
        if self._dialect.has_system_token and any(piece.text for piece in opening):
            yield _token(dialects.SYSTEM)
        yield from opening
        yield from self._turns(rest, shows_thoughts)

    def _turns(self, messages: list[ChatMessage], shows_thoughts: bool) -> Iterator[PromptPiece]:
        for is_turn, group in groupby(messages, key=lambda message: message.role in ("user", "tool")):
            if is_turn:
                yield _token(dialects.USER)
                yield _plain("\n\n".join(self._texts(group)))
                continue
            for message in group:
                if message.role == "assistant":
                    yield from self._reply(message, shows_thoughts)
                else:
                    yield _token(dialects.SYSTEM)
                    yield _plain(message.content)

    def _texts(self, turn: Iterable[ChatMessage]) -> Iterator[str]:
        """What users and tools say in a row, which is one turn."""
        for is_result, group in groupby(turn, key=lambda message: message.role == "tool"):
            texts = [message.content for message in group]
            if is_result:
                yield from (f"<tool_result>{text}</tool_result>" for text in texts)
            elif self._dialect.joins_empty_texts:
                yield from texts
            else:
                yield "\n\n".join(text for text in texts if text)

    def _reply(self, message: ChatMessage, shows_thoughts: bool) -> Iterator[PromptPiece]:
        yield _token(dialects.ASSISTANT)
        if shows_thoughts:
            yield _token(dialects.THINK)
            yield _plain(message.reasoning)
        yield _token(dialects.THINK_END)
        yield _plain(message.content)
        if message.calls:
            yield from _fixed(f"\n\n<{self._dialect.block}>\n")
            for call in message.calls:
                yield from self._call(call)
            yield from _fixed(f"</{self._dialect.block}>")
        yield _token(dialects.END)

    def _call(self, call: Call) -> Iterator[PromptPiece]:
        yield from _fixed(f"<{self._dialect.invoke} name=")
        yield _plain(f'"{call.name}">\n')
        yield _plain("" if call.arguments else self._dialect.empty_arguments)
        for name, value in call.arguments.items():
            yield from _fixed(f"<{self._dialect.parameter} name=")
            yield _plain(f'"{name}" string="{"true" if isinstance(value, str) else "false"}">{_as_text(value)}')
            yield from _fixed(f"</{self._dialect.parameter}>\n")
        yield from _fixed(f"</{self._dialect.invoke}>\n")

    def _reply_start(self, thinks: bool, forced: bool) -> Iterator[PromptPiece]:
        yield _token(dialects.ASSISTANT)
        yield _token(dialects.THINK if thinks else dialects.THINK_END)
        if forced:
            yield from _fixed(f"\n\n<{self._dialect.block}>\n")


def _resolve_thinking(thinking: bool | None, effort: Effort | None) -> bool:
    """Thinking is the model's habit; the effort "none" turns it off, any other asks for it."""
    if effort is None:
        return thinking is not False
    if thinking is False and effort != "none":
        raise DSparkError(f"reasoning_effort is {effort!r}, but thinking is turned off: leave one of the two out")
    if thinking and effort == "none":
        raise DSparkError("reasoning_effort is 'none', but thinking is turned on: leave one of the two out")
    return effort != "none"


def _check_forced(choice: ToolChoice, thinks: bool) -> bool:
    forced = is_forced(choice)
    if forced and thinks:
        raise DSparkError(
            "tool_choice asks for a call before the model has thought, which it cannot do while it thinks: "
            "turn thinking off (reasoning_effort none), or take tool_choice auto"
        )
    return forced


def _tools_text(dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> list[PromptPiece]:
    """The part of the system text that describes the tools, after a blank line; nothing without tools."""
    if not tools:
        return []
    schemas = "\n".join(
        _as_text(
            {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {},
            }
        )
        for tool in tools
    )
    return [*_fixed("\n\n" + dialect.tools), _plain(schemas), *_fixed(dialects.TOOLS_END)]


def _format_text(dialect: Dialect, response_format: Mapping[str, Any] | None) -> list[PromptPiece]:
    """The part of the system text that asks for JSON, after a blank line; nothing for other formats."""
    kind = (response_format or {}).get("type")
    if kind == "json_object":
        return [_plain("\n\n" + dialect.json_reply)]
    if kind == "json_schema":
        wrapped = (response_format or {}).get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
        if not isinstance(schema, Mapping):
            raise DSparkError('response_format is {"type": "json_schema", "json_schema": {"schema": {...}}}')
        return [_plain("\n\n" + dialects.RESPONSE_FORMAT + _as_text(schema))]
    return []


def _join(*sections: list[PromptPiece]) -> list[PromptPiece]:
    return [piece for section in sections for piece in section]


def _as_text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DSparkError(f"a tool or an argument cannot be written as JSON: {error}") from None


def _plain(text: str) -> PromptPiece:
    return PromptPiece(text, is_token=False)


def _token(text: str) -> PromptPiece:
    return PromptPiece(text, is_token=True)


def _fixed(text: str) -> list[PromptPiece]:
    """A text of the format itself, whose tokens are meant as tokens."""
    return [PromptPiece(part, bool(place % 2)) for place, part in enumerate(_TOKENS_IN_TEXT.split(text))]
