"""What the server needs of a model's chat format: messages to a prompt, and the reply's text to its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
ToolChoice = str | Mapping[str, Any]
Effort = str | int


class PromptPiece(NamedTuple):
    """A part of a prompt: one token of the chat format spelt out, or plain text.

    Plain text is tokenised without the tokens of the format, so that what a user types never becomes one of them:
    "<|assistant|>" in a question is eleven or so ordinary tokens and begins no turn.
    """

    text: str
    is_token: bool


@dataclass(frozen=True)
class ToolCallDelta:
    """Part of one call.

    Args:
        index: which call of the reply.
        id: on the first part of a call, else None.
        name: on the first part of a call, else None.
        arguments: the next characters of the JSON object of arguments.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ReplyDelta:
    """The next part of a reply; exactly one field is filled."""

    reasoning: str = ""
    content: str = ""
    tool_call: ToolCallDelta | None = None


class ReplyParser(Protocol):
    """Takes a reply's text in pieces of any size. How it is cut never changes what comes out, only when."""

    @property
    def has_tool_calls(self) -> bool:
        """At least one call has begun, so the reply finishes with "tool_calls" instead of "stop"."""
        ...

    def push(self, text: str) -> list[ReplyDelta]:
        """What is certain after this piece; the rest is held back."""
        ...

    def finish(self) -> list[ReplyDelta]:
        """What was held back, when the reply has ended."""
        ...


class ChatEncoding(Protocol):
    """A model's chat format."""

    supports_tools: bool
    supports_reasoning: bool

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
        """The prompt that asks for the next reply.

        Args:
            messages: as in OpenAI's chat completions, oldest first.
            tools: functions that the model may call.
            tool_choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}.
            reasoning_effort: how long the model should think; "none" turns thinking off.
            thinking: whether the model thinks before it answers; None takes the model's habit.
            response_format: as in OpenAI's chat completions; models trained with a schema in the prompt get it there.

        Raises:
            DSparkError: a message is malformed, or something is asked that the format has no words for.
        """
        ...

    def parser(
        self,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: Effort | None = None,
        thinking: bool | None = None,
    ) -> ReplyParser:
        """The parser of the reply to a prompt that was made with the same arguments."""
        ...

    def reply_grammar(
        self,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: Effort | None = None,
        thinking: bool | None = None,
    ) -> str | None:
        """What the reply to such a prompt must look like, in Lark's notation; None where it may be anything."""
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: Effort | None = None,
        thinking: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as one text with its tokens spelt out; `pieces` tells them from a user's own words."""
        pieces = self.pieces(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            reasoning_effort=reasoning_effort,
            thinking=thinking,
            response_format=response_format,
        )
        return "".join(piece.text for piece in pieces)
