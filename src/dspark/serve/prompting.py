"""From the messages of a chat to the token ids of its prompt, and to the parser of its reply."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark.serve.encoding import ReplyParser, piece_ids
from dspark.serve.errors import bad_request
from dspark.serve.protocol import ChatMessage, ChatRequest
from dspark.serve.service import Service


@dataclass(frozen=True)
class ChatPrompt:
    """A chat's prompt, and what its reply is read with.

    Attributes:
        token_ids: of the prompt.
        service: knows the chat format.
        settings: arguments of the chat format that prompt and reply share.
    """

    token_ids: list[int]
    service: Service
    settings: dict[str, Any]

    def parser(self) -> ReplyParser:
        """A parser for one sample."""
        return self.service.require_chat().parser(**self.settings)

    def reply_grammar(self) -> str | None:
        """What every sample must look like."""
        return self.service.require_chat().reply_grammar(**self.settings)


async def chat_prompt(service: Service, body: ChatRequest, *, is_constrained: bool) -> ChatPrompt:
    """Render the messages of a chat.

    Args:
        service: knows the chat format.
        body: the request.
        is_constrained: the text has to follow a grammar, which has no place for thoughts and calls.
    Raises:
        DSparkError, ApiError: the model's chat format has no words for something that is asked.
    """
    settings = _settings(service, body, is_constrained=is_constrained)
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        response_format = wanted.model_dump(by_alias=True, exclude_unset=True)
    else:
        response_format = None
    messages = plain_messages(body.messages)
    token_ids = await message_ids(service, messages, response_format=response_format, **settings)
    return ChatPrompt(token_ids, service, settings)


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the chat format takes them."""
    return [message.model_dump(exclude_unset=True) for message in messages]


async def message_ids(service: Service, messages: list[dict[str, Any]], **settings: Any) -> list[int]:
    """Token ids of the prompt that messages make; rendering and encoding run beside the event loop."""
    encoding = service.require_chat()

    def render() -> list[int]:
        return piece_ids(service.engine.tokenizer, encoding.pieces(messages, **settings))

    return await asyncio.to_thread(render)


def _settings(service: Service, body: ChatRequest, *, is_constrained: bool) -> dict[str, Any]:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice: Any = body.tool_choice or "auto"
    if not isinstance(choice, str):
        choice = choice.model_dump()
    thinking = body.wants_thinking
    effort = body.reasoning_effort
    if is_constrained and tools and choice != "none":
        raise bad_request(
            "the text is constrained and tools are offered, and a call would break the constraint: give one of "
            'them, or tool_choice "none"',
            "tools",
        )
    # A grammar holds from the first token, and a forced call opens the reply: neither leaves room to think.
    is_bound = is_constrained or (bool(tools) and choice not in ("auto", "none"))
    if is_constrained and (thinking or effort not in (None, "none")):
        raise bad_request(
            "the text is constrained and the model is asked to think, which would break the constraint: give one of "
            "them",
            "response_format",
        )
    if is_bound and thinking is None and effort is None and service.require_chat().supports_reasoning:
        thinking = False
    return {"tools": tools or None, "tool_choice": choice, "reasoning_effort": effort, "thinking": thinking}
