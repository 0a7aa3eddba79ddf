"""POST /tokenize and /detokenize."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from dspark.serve.bodies import json_body
from dspark.serve.errors import bad_request
from dspark.serve.prompting import message_ids, plain_messages
from dspark.serve.protocol import DetokenizeRequest, TokenizeRequest
from dspark.serve.service import service_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(
    request: Request, body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))]
) -> dict[str, Any]:
    """Token ids of a text, or of the prompt that messages make."""
    service = service_of(request)
    service.require_model(body.model)
    if body.messages is not None:
        token_ids = await message_ids(service, plain_messages(body.messages))
    else:
        text = body.prompt or ""
        token_ids = await asyncio.to_thread(service.text_ids, text, add_special_tokens=body.add_special_tokens)
    listed = {"count": len(token_ids), "max_model_len": service.engine.max_model_len, "tokens": token_ids}
    texts = [service.texts.text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return {**listed, "token_strs": texts}


@router.post("/detokenize")
async def detokenize(
    request: Request, body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]
) -> dict[str, Any]:
    """Text of token ids; special tokens have none."""
    service = service_of(request)
    service.require_model(body.model)
    tokenizer = service.engine.tokenizer
    if len(body.tokens) > service.engine.max_model_len:
        raise bad_request(
            f"tokens holds {len(body.tokens)} ids and the context holds {service.engine.max_model_len}: "
            "send them in parts",
            "tokens",
        )
    wrong = [token_id for token_id in body.tokens if token_id >= tokenizer.vocab_size]
    if wrong:
        raise bad_request(f"tokens holds {wrong[0]}; ids go from 0 to {tokenizer.vocab_size - 1}", "tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)}
