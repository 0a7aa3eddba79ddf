"""The chat format of a model that ships a Jinja template; replies of such models are plain text here."""

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.config.errors import DSparkError
from dspark.serve.chat_template import ChatTemplate
from dspark.serve.encoding.messages import Call, ChatMessage, is_forced, offered_tools, read_messages, require_text
from dspark.serve.encoding.protocol import (
    ChatEncoding,
    Effort,
    Message,
    PromptPiece,
    ReplyDelta,
    ReplyParser,
    Tool,
    ToolChoice,
)


class TemplateEncoding(ChatEncoding):
    """Messages through a template.

    A template that reads `tools` gets them. How its model writes calls is not part of a template, so such replies
    arrive as content, and no call can be forced.

    Args:
        template: the model's.
    """

    supports_reasoning = False

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.supports_tools = "tools" in template.variables

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
        """See ChatEncoding; a response format has no words in a template and changes nothing in the prompt."""
        offered = self._check(tools, tool_choice, reasoning_effort, thinking)
        read = read_messages(messages)
        if not self.supports_tools and any(message.calls for message in read):
            raise DSparkError("the messages hold tool calls, which this model's chat template has no words for")
        extra = {"tools": [{"type": "function", "function": function} for function in offered]} if offered else {}
        pieces = self._template.pieces([_as_dict(message) for message in read], extra)
        return require_text(PromptPiece(text, is_token) for text, is_token in pieces)

    def parser(
        self,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: Effort | None = None,
        thinking: bool | None = None,
    ) -> ReplyParser:
        """See ChatEncoding."""
        self._check(tools, tool_choice, reasoning_effort, thinking)
        return TextParser()

    def _check(
        self, tools: Sequence[Tool] | None, choice: ToolChoice, effort: Effort | None, thinking: bool | None
    ) -> tuple[Mapping[str, Any], ...]:
        """Refuse what a template cannot say; the tools that it gets."""
        if thinking or effort not in (None, "none"):
            asked = "thinking is turned on" if thinking else f"reasoning_effort is {effort!r}"
            raise DSparkError(f"{asked}, but this model does not think before it answers: leave it out")
        offered = offered_tools(tools, choice)
        if offered and not self.supports_tools:
            raise DSparkError("the request has tools, but this model was not trained to call them: leave tools out")
        if offered and is_forced(choice):
            raise DSparkError("tool_choice asks for a call, which this model's chat template cannot force: take auto")
        return offered


class TextParser:
    """A reply without parts."""

    has_tool_calls = False

    def push(self, text: str) -> list[ReplyDelta]:
        """See ReplyParser."""
        return [ReplyDelta(content=text)] if text else []

    def finish(self) -> list[ReplyDelta]:
        """See ReplyParser."""
        return []


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        fields["tool_calls"] = [_call_dict(call) for call in message.calls]
    if message.call_id:
        fields["tool_call_id"] = message.call_id
    return fields


def _call_dict(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
