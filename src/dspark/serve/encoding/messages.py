"""Messages as a client sends them, checked and brought into one form that both chat formats read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.config.errors import DSparkError
from dspark.serve.encoding.protocol import Message, PromptPiece, Tool, ToolChoice

ROLES = ("system", "user", "assistant", "tool")
# Text that arrives in several parts is one text with a blank line between them.
PART_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Call:
    """A call in an earlier reply.

    Args:
        id: what the result refers to.
        name: of the function.
        arguments: by name; text that is no JSON object stands under the name "arguments".
    """

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ChatMessage:
    """One checked message."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""


def read_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Check the messages of a request; results of several calls come in the order of the calls.

    Raises:
        DSparkError: says which message is wrong, and in what.
    """
    if not messages:
        raise DSparkError("messages is empty: a chat begins with at least one message")
    read = [_read_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    return _with_results_in_order(read)


def require_text(pieces: Iterable[PromptPiece]) -> tuple[PromptPiece, ...]:
    """The pieces of a prompt that are not empty, when they are text that UTF-8 can hold.

    Raises:
        DSparkError: a message, an argument or a tool holds half of a surrogate pair.
    """
    whole = tuple(piece for piece in pieces if piece.text)
    for piece in whole:
        try:
            piece.text.encode("utf-8")
        except UnicodeEncodeError as error:
            around = piece.text[max(error.start - 20, 0) : error.start + 20]
            raise DSparkError(f"the messages are not valid text: half of a surrogate pair in {around!r}") from None
    return whole


def offered_tools(tools: Sequence[Tool] | None, choice: ToolChoice) -> tuple[Mapping[str, Any], ...]:
    """The functions that the model may call under a choice: all, the named one, or none.

    Raises:
        DSparkError: a tool or the choice is malformed, or names no tool of the request.
    """
    functions = tuple(_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools or ()))
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise DSparkError(f"tool_choice is {choice!r}: it is none, auto, required, or names a function")
        if choice == "required" and not functions:
            raise DSparkError("tool_choice is required, but the request has no tools: add tools or take auto")
        return () if choice == "none" else functions
    name = _named_choice(choice)
    chosen = tuple(function for function in functions if function["name"] == name)
    if not chosen:
        known = ", ".join(str(function["name"]) for function in functions) or "none"
        raise DSparkError(f"tool_choice names the function {name!r}, but the tools of the request are: {known}")
    return chosen


def is_forced(choice: ToolChoice) -> bool:
    """Whether the reply has to be a call."""
    return choice not in ("none", "auto")


def _named_choice(choice: Mapping[str, Any]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise DSparkError('tool_choice as an object is {"type": "function", "function": {"name": ...}}')
    return name


def _read_tool(place: str, tool: Tool) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise DSparkError(f'{place} is not {{"type": "function", "function": {{...}}}}, the only kind of tool')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise DSparkError(f"{place}.function has no name")
    if any(character in function["name"] for character in '"<>\n'):
        raise DSparkError(f"{place}.function.name is {function['name']!r}: quotes, < , > and line ends cannot be in it")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise DSparkError(f"{place}.function.parameters is a JSON schema, an object, not {_kind(parameters)}")
    return function


def _read_message(place: str, message: Message) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise DSparkError(f"{place} is an object with role and content, not {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise DSparkError(f"{place}.role is {role!r}: roles are {', '.join(ROLES)}")
    content = _read_text(f"{place}.content", message.get("content"))
    if role == "assistant":
        return _read_assistant(place, message, content)
    if message.get("content") is None:
        raise DSparkError(f"{place} of role {role} has no content")
    if role != "tool":
        return ChatMessage(role, content)
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str):
        raise DSparkError(f"{place} of role tool has no tool_call_id: it names the call that this is the result of")
    return ChatMessage(role, content, call_id=call_id)


def _read_assistant(place: str, message: Message, content: str) -> ChatMessage:
    listed = message.get("tool_calls") or ()
    if message.get("content") is None and not listed:
        raise DSparkError(f"{place} of role assistant has neither content nor tool_calls")
    if message.get("prefix"):
        raise DSparkError(f"{place}.prefix is not supported: a reply begins anew; use completions to continue a text")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise DSparkError(f"{place}.tool_calls is a list, not {_kind(listed)}")
    # Both spellings are in use for what the model thought before it answered.
    thought = message.get("reasoning_content", message.get("reasoning"))
    reasoning = _read_text(f"{place}.reasoning_content", thought)
    calls = tuple(_read_call(f"{place}.tool_calls[{index}]", call) for index, call in enumerate(listed))
    return ChatMessage("assistant", content, reasoning, calls)


def _read_text(place: str, value: Any) -> str:
    """A text, or the text parts of a list; nothing is an empty text."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, Sequence):
        raise DSparkError(f"{place} is text or a list of text parts, not {_kind(value)}")
    return PART_SEPARATOR.join(_read_part(f"{place}[{index}]", part) for index, part in enumerate(value))


def _read_part(place: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text":
        raise DSparkError(f"{place} has the type {kind!r}: this model is served with text only")
    if not isinstance(text, str):
        raise DSparkError(f"{place}.text is a text, not {_kind(text)}")
    return text


def _read_call(place: str, call: Any) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise DSparkError(f'{place} is not {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}')
    return Call(str(call.get("id", "")), name, _read_arguments(function.get("arguments", "")))


def _read_arguments(written: Any) -> Mapping[str, Any]:
    """Arguments by name; what a model wrote wrongly is kept, since it is part of the dialogue that happened."""
    if isinstance(written, Mapping):
        return written
    try:
        arguments = json.loads(written)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": written}


def _with_results_in_order(messages: list[ChatMessage]) -> list[ChatMessage]:
    ordered: list[ChatMessage] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        if message.role == "tool":
            raise DSparkError(
                f"messages[{place}] is the result of a call, but no assistant message with tool_calls comes before it"
            )
        ordered.append(message)
        place += 1
        if message.calls:
            end = place
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            ordered += _results_of(message.calls, messages[place:end], place)
            place = end
    return ordered


def _results_of(calls: tuple[Call, ...], results: list[ChatMessage], place: int) -> list[ChatMessage]:
    """The results of one message's calls, each exactly once."""
    given = sorted(result.call_id for result in results)
    asked = sorted(call.id for call in calls)
    if given != asked:
        raise DSparkError(
            f"messages[{place - 1}] makes the calls {', '.join(asked)}, but the tool messages after it answer "
            f"{', '.join(given) or 'none'}: give one tool message for each call"
        )
    order = [call.id for call in calls]
    return sorted(results, key=lambda result: order.index(result.call_id))


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
