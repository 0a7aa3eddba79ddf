"""POST /v1/completions."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from dspark.engine.request import Emission
from dspark.serve.bodies import json_body
from dspark.serve.choice import Choice, answer_figures, usage
from dspark.serve.errors import as_api_error
from dspark.serve.generation import Generation, begin
from dspark.serve.protocol import CompletionRequest
from dspark.serve.sampling import completion_params
from dspark.serve.service import Service, service_of
from dspark.serve.streaming import DONE, EventStream, event, until_disconnect

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(
    request: Request, body: Annotated[CompletionRequest, Depends(json_body(CompletionRequest))]
) -> Response:
    """Continue texts or token ids."""
    service = service_of(request)
    service.require_model(body.model)
    params = completion_params(body)
    answer = CompletionAnswer(service, body)
    if body.stream:
        generation = await answer.begin(request, params)
        return EventStream(answer.events(generation), generation.close, request.state.deadline)
    return JSONResponse(await until_disconnect(request, answer.whole(request, params)))


class CompletionAnswer:
    """How one request wants its answer."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self._service = service
        self._body = body
        self._prompts: list[str] | list[list[int]] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._offsets: dict[int, int] = {}

    async def begin(self, request: Request, params: list[Any]) -> Generation:
        """Hand it to the engine."""
        self._service.require_room(len(self._prompts) * self._body.num_samples)
        prompts = [await self._ids(prompt) for prompt in self._prompts]
        is_scoring = self._body.max_tokens == 0
        return await begin(request, prompts, params, priority=self._body.priority, is_scoring=is_scoring)

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        wanted = self._body.add_special_tokens
        return await asyncio.to_thread(self._service.text_ids, prompt, add_special_tokens=wanted)

    async def whole(self, request: Request, params: list[Any]) -> dict[str, Any]:
        """The answer in one piece."""
        generation = await self.begin(request, params)
        await generation.finish()
        listed = []
        for choice in generation.choices:
            text = self._echo(choice) + choice.text
            listed.append(self._choice(choice, text, self._logprobs(choice, choice.token_ids, choice.logprobs)))
        figures = answer_figures(generation.choices, generation.speculation, with_origins=self._body.stream_origins)
        return {**self._head(generation), "choices": listed, "usage": usage(generation.choices), "dspark": figures}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer in pieces."""
        options = self._body.stream_options
        try:
            async for choice, emission in generation:
                piece = self._piece(generation, choice, emission)
                if piece is not None:
                    yield event(piece)
            if options is not None and options.include_usage:
                yield event({**self._head(generation), "choices": [], "usage": usage(generation.choices)})
        except Exception as error:
            # The status line is sent already: the error is the last event.
            yield event(as_api_error(error, self._service.settings.request_timeout_s).body())
        yield DONE

    def _piece(self, generation: Generation, choice: Choice, emission: Emission) -> dict[str, Any] | None:
        """One chunk; None while there is nothing to tell."""
        is_first = choice.index not in self._offsets
        text = (self._echo(choice) if is_first else "") + ("" if choice.is_scoring else emission.text)
        token_ids = [] if choice.is_scoring else list(emission.token_ids)
        found = [] if choice.is_scoring else list(emission.logprobs)
        logprobs = self._logprobs(choice, token_ids, found, is_first=is_first)
        self._offsets.setdefault(choice.index, 0)
        options, body = self._body.stream_options, self._body
        extras = stream_figures(generation, choice, emission, with_origins=body.stream_origins)
        if not (text or logprobs or extras or choice.finish_reason):
            return None
        piece: dict[str, Any] = {**self._head(generation), "choices": [self._choice(choice, text, logprobs)]}
        if options is not None and options.continuous_usage_stats:
            piece["usage"] = usage(generation.choices)
        elif options is not None and options.include_usage:
            piece["usage"] = None
        return piece | ({"dspark": extras} if extras else {})

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": f"cmpl-{generation.request_id}",
            "object": "text_completion",
            "created": generation.created,
            "model": self._body.model or self._service.settings.model_name,
        }

    def _choice(self, choice: Choice, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _echo(self, choice: Choice) -> str:
        """The prompt as text, where it is to be repeated; a prompt that came as text is repeated to the letter."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[choice.prompt_index]
        return prompt if isinstance(prompt, str) else str(self._service.engine.tokenizer.decode(prompt))

    def _logprobs(
        self, choice: Choice, token_ids: list[int], found: list[Any], *, is_first: bool = True
    ) -> dict[str, Any] | None:
        """The `logprobs` of some tokens; those of a repeated prompt come before the first of them."""
        if self._body.logprobs is None:
            return None
        offset = self._offsets.get(choice.index, 0)
        if self._body.echo and is_first:
            token_ids = [*choice.prompt_ids, *token_ids]
            found = [*(choice.prompt_logprobs or [None] * len(choice.prompt_ids)), *found]
        if not token_ids:
            return None
        listed, self._offsets[choice.index] = self._service.texts.completion_logprobs(token_ids, found, offset)
        return listed


def stream_figures(
    generation: Generation, choice: Choice, emission: Emission, *, with_origins: bool
) -> dict[str, Any] | None:
    """The `dspark` object of a chunk: origins of its tokens where asked for; with the last one, how it was made."""
    figures: dict[str, Any] = {}
    if choice.finish_reason is not None:
        figures = {"speculation": generation.speculation, **choice.figures(with_origins=False)}
    if with_origins and not choice.is_scoring:
        figures |= {
            "token_ids": list(emission.token_ids),
            "token_texts": generation.service.texts.shares(emission.token_ids, choice.decoder),
            "origins": list(emission.origins),
            "verify_len": emission.verify_len,
        }
    return figures or None
