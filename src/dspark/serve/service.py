"""What the endpoints of one app share: the engine, the settings, the chat format, the metrics."""

import time
from dataclasses import dataclass, field
from difflib import get_close_matches

from fastapi import Request

from dspark.config.errors import DSparkError
from dspark.serve.encoding import ChatEncoding, chat_encoding
from dspark.serve.errors import ApiError, bad_request
from dspark.serve.metrics import Metrics
from dspark.serve.served_engine import ServedEngine
from dspark.serve.settings import ServerSettings
from dspark.serve.token_text import TokenTexts


@dataclass
class Service:
    """The parts.

    Attributes:
        engine, settings, metrics: of the app.
        texts: tokens as the API shows them.
        chat: the model's chat format, or None.
        chat_refusal: why there is none.
        created: seconds since 1970 at which the model began to be served.
    """

    engine: ServedEngine
    settings: ServerSettings
    metrics: Metrics
    texts: TokenTexts
    chat: ChatEncoding | None
    chat_refusal: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def require_model(self, name: str | None) -> None:
        """Refuse a model that is not served here. A request without a name means the one that is."""
        served = self.settings.served_model_names
        if name is None or name in served:
            return
        near = get_close_matches(name, served, n=1, cutoff=0.0)[0]
        raise ApiError(
            404,
            f"the model {name!r:.80} is not served here; did you mean {near!r}?",
            param="model",
            code="model_not_found",
        )

    def require_room(self, num_requests: int) -> None:
        """Refuse more samples at once than could ever be here, before any of their prompts is looked at."""
        room = self.engine.capacity
        if room is not None and num_requests > room:
            raise bad_request(
                f"{num_requests} samples were asked for at once and this server holds {room}: ask for fewer at a time"
            )

    def require_chat(self) -> ChatEncoding:
        """The chat format. Raises ApiError where the model has none."""
        if self.chat is None:
            raise bad_request(self.chat_refusal, "messages")
        return self.chat

    def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text; the token that begins every document comes first unless it is there or not wanted.

        Raises:
            ApiError: it could never be a prompt; a text of megabytes is not encoded to find that out.
        """
        tokenizer, limit = self.engine.tokenizer, self.engine.max_model_len
        if (least := tokenizer.least_tokens(text)) >= limit:
            raise bad_request(
                f"the prompt has at least {least} tokens and the context holds {limit} with at least one for the "
                "output: shorten it",
                "prompt",
                "context_length_exceeded",
            )
        token_ids: list[int] = self.engine.tokenizer.encode(text)
        begin = self.engine.assembly.plan.bos_token_id
        return token_ids if not add_special_tokens or token_ids[:1] == [begin] else [begin, *token_ids]


def make_service(engine: ServedEngine, settings: ServerSettings) -> Service:
    """Put the parts together; a model without a chat format is served without chat."""
    tokenizer = engine.tokenizer
    chat, refusal = None, ""
    try:
        chat = chat_encoding(engine.assembly.folder)
    except DSparkError as error:
        refusal = str(error)
    return Service(
        engine=engine,
        settings=settings,
        metrics=Metrics(settings.metrics_prefix, settings.model_name, engine.status),
        texts=TokenTexts(tokenizer.token_bytes, tokenizer.special_ids),
        chat=chat,
        chat_refusal=refusal,
    )


def service_of(request: Request) -> Service:
    """The service of the app that a request came to."""
    service: Service = request.app.state.service
    return service
