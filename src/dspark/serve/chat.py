"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from dspark.engine.request import Emission
from dspark.serve.bodies import json_body
from dspark.serve.choice import Choice, answer_figures, usage
from dspark.serve.completions import stream_figures
from dspark.serve.encoding import ReplyDelta, ReplyParser, ToolCallDelta
from dspark.serve.errors import as_api_error, bad_request
from dspark.serve.generation import Generation, begin
from dspark.serve.prompting import ChatPrompt, chat_prompt
from dspark.serve.protocol import ChatRequest
from dspark.serve.sampling import chat_params, is_constrained
from dspark.serve.service import Service, service_of
from dspark.serve.streaming import DONE, EventStream, event, until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(
    request: Request, body: Annotated[ChatRequest, Depends(json_body(ChatRequest))]
) -> Response:
    """Reply to messages."""
    service = service_of(request)
    service.require_model(body.model)
    chat_params(body, 1)  # what is wrong with the parameters is said before the prompt is rendered
    prompt = await chat_prompt(service, body, is_constrained=is_constrained(body))
    answer = ChatAnswer(service, body, prompt)
    if body.stream:
        generation = await answer.begin(request)
        return EventStream(answer.events(generation), generation.close, request.state.deadline)
    return JSONResponse(await until_disconnect(request, answer.whole(request)))


@dataclass
class Reply:
    """The parts of one sample's text, as far as they are known."""

    parser: ReplyParser
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    has_begun: bool = False
    num_reasoning_tokens: int = 0
    _num_characters: int = 0

    def take(self, text: str, *, is_final: bool) -> list[ReplyDelta]:
        """Add text; the parts that are new."""
        deltas = self.parser.push(text) if text else []
        if is_final:
            deltas = [*deltas, *self.parser.finish()]
        for delta in deltas:
            self.reasoning += delta.reasoning
            self.content += delta.content
            if delta.tool_call is not None:
                self._add_call(delta.tool_call)
        return deltas

    def _add_call(self, delta: ToolCallDelta) -> None:
        if delta.index == len(self.calls):
            function = {"name": delta.name or "", "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": function})
        self.calls[delta.index]["function"]["arguments"] += delta.arguments

    def count_reasoning(self, token_ids: Sequence[int], characters_of: Callable[[int], int]) -> int:
        """Tokens that begin in the thoughts, with which a reply begins.

        Args:
            token_ids: of the reply so far.
            characters_of: a token.
        """
        while self.num_reasoning_tokens < len(token_ids) and self._num_characters < len(self.reasoning):
            self._num_characters += characters_of(token_ids[self.num_reasoning_tokens])
            self.num_reasoning_tokens += 1
        return self.num_reasoning_tokens

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the reply ended, in the API's words."""
        return "tool_calls" if reason == "stop" and self.parser.has_tool_calls else reason

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


class ChatAnswer:
    """How one request wants its answer."""

    def __init__(self, service: Service, body: ChatRequest, prompt: ChatPrompt) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        self._replies = [Reply(prompt.parser()) for _ in range(body.num_samples)]

    async def begin(self, request: Request) -> Generation:
        """Hand it to the engine."""
        engine = self._service.engine
        num_tokens = len(self._prompt.token_ids)
        if num_tokens >= engine.max_model_len:
            raise bad_request(
                f"the messages make a prompt of {num_tokens} tokens and the context holds {engine.max_model_len} with "
                "at least one for the reply: shorten them",
                "messages",
                "context_length_exceeded",
            )
        params = chat_params(self._body, engine.max_len - num_tokens, self._prompt.reply_grammar())
        return await begin(request, [self._prompt.token_ids], params, priority=self._body.priority)

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one piece."""
        generation = await self.begin(request)
        await generation.finish()
        listed = []
        for choice, reply in zip(generation.choices, self._replies, strict=True):
            reply.take(choice.text, is_final=True)
            listed.append(
                {
                    "index": choice.index,
                    "message": reply.message(),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": reply.finish_reason(choice.finish_reason),
                }
            )
        figures = answer_figures(generation.choices, generation.speculation, with_origins=self._body.stream_origins)
        head = self._head(generation, "chat.completion")
        return {**head, "choices": listed, "usage": self._usage(generation), "dspark": figures}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer in pieces."""
        options = self._body.stream_options
        try:
            async for choice, emission in generation:
                for piece in self._pieces(generation, choice, emission):
                    yield event(piece)
            if options is not None and options.include_usage:
                head = self._head(generation, "chat.completion.chunk")
                yield event({**head, "choices": [], "usage": self._usage(generation)})
        except Exception as error:
            # The status line is sent already: the error is the last event.
            yield event(as_api_error(error, self._service.settings.request_timeout_s).body())
        yield DONE

    def _pieces(self, generation: Generation, choice: Choice, emission: Emission) -> list[dict[str, Any]]:
        """The chunks of one emission: a chunk holds one part of the reply, and the last one the reason of the end."""
        reply = self._replies[choice.index]
        reason = choice.finish_reason
        deltas = [as_delta(delta) for delta in reply.take(emission.text, is_final=reason is not None)]
        if not reply.has_begun:
            deltas.insert(0, {"role": "assistant", "content": ""})
            reply.has_begun = True
        logprobs = self._logprobs(emission.logprobs)
        extras = stream_figures(generation, choice, emission, with_origins=self._body.stream_origins)
        if not deltas and (logprobs or extras):
            deltas.append({})
        if reason is not None and deltas[-1]:
            deltas.append({})
        pieces = [self._piece(generation, choice, delta) for delta in deltas]
        if pieces and logprobs:
            carrier = next(
                (piece for piece, delta in zip(pieces, deltas, strict=True) if "role" not in delta), pieces[0]
            )
            carrier["choices"][0]["logprobs"] = logprobs
        if extras:
            pieces[-1]["dspark"] = extras
        if reason is not None:
            pieces[-1]["choices"][0]["finish_reason"] = reply.finish_reason(reason)
        return pieces

    def _piece(self, generation: Generation, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        listed = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        piece: dict[str, Any] = {**self._head(generation, "chat.completion.chunk"), "choices": [listed]}
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            piece["usage"] = self._usage(generation)
        elif options is not None and options.include_usage:
            piece["usage"] = None
        return piece

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """The `usage` object; of a model that thinks, also how many tokens it thought."""
        counts = usage(generation.choices)
        if not self._service.require_chat().supports_reasoning:
            return counts
        characters_of = self._service.texts.num_characters
        thought = sum(
            reply.count_reasoning(choice.token_ids, characters_of)
            for choice, reply in zip(generation.choices, self._replies, strict=True)
        )
        return {**counts, "completion_tokens_details": {"reasoning_tokens": thought}}

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{generation.request_id}",
            "object": kind,
            "created": generation.created,
            "model": self._body.model or self._service.settings.model_name,
        }

    def _logprobs(self, found: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs or not found:
            return None
        return {"content": self._service.texts.chat_logprobs(found), "refusal": None}


def as_delta(delta: ReplyDelta) -> dict[str, Any]:
    """A part of a reply as the API shows it."""
    if delta.tool_call is None:
        return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}
    call = delta.tool_call
    function: dict[str, Any] = {"arguments": call.arguments}
    listed: dict[str, Any] = {"index": call.index, "function": function}
    if call.id is not None:
        listed |= {"id": call.id, "type": "function", "function": {"name": call.name, **function}}
    return {"tool_calls": [listed]}
