"""The requests that the server understands, field by field; a field that is not here is refused by name.

Fields of the OpenAI API come first in each model, then those that other servers of the field have added. What is known
and not offered has its own list: a value that changes nothing passes, any other is refused.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

TokenId = Annotated[StrictInt, Field(ge=0)]
# What JSON calls a number may have any size; no field needs an integer that a float cannot hold.
Number = Annotated[StrictFloat, Field(allow_inf_nan=False)] | Annotated[StrictInt, Field(ge=-(2**53), le=2**53)]
Json = dict[str, Any]
MAX_SAMPLES = 128
MAX_STOPS = 64
MAX_STOP_IDS = 1024


class Strict(BaseModel):
    """A part of a request; an unknown field is an error, and so is a string in place of a number."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class StreamOptions(Strict):
    """What a stream carries besides its pieces."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Strict):
    """The schema of a response format."""

    name: StrictStr = ""
    description: StrictStr | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('response_format: a json_schema belongs to the type "json_schema", and to no other')
        return self


class StructuredOutputs(Strict):
    """One constraint on the text."""

    json_: Json | StrictStr | None = Field(default=None, alias="json")
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


def _read_stop(value: Any) -> tuple[str, ...] | None:
    """One text, or several."""
    if value is None:
        return None
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
    if (not texts and value != []) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("stop must be a non-empty string or a list of them")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"stop holds {len(texts)} strings, and {MAX_STOPS} are taken at most")
    return texts


class GenerationRequest(Strict):
    """What completions and chat completions have in common."""

    model: StrictStr | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_SAMPLES)] | None = None
    presence_penalty: Number | None = None
    seed: StrictInt | None = None
    stop: Annotated[tuple[str, ...] | None, PlainValidator(_read_stop)] = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    response_format: ResponseFormat | None = None
    # Who asks, for the client's own books: nothing here depends on it.
    user: StrictStr | None = None

    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    sampler: StrictStr | None = None
    priority: Annotated[StrictInt, Field(ge=-1000, le=1000)] = 0
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    # Each chunk of a stream, and each choice of an answer, also tells its token ids and where each came from.
    stream_origins: StrictBool = False

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed with stream: true only")
        return self

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return self.n or 1


def _read_prompt(value: Any) -> str | list[str] | list[list[int]]:
    """One text, several texts, or the token ids of one or several prompts; one list of ids becomes a list of one."""
    if value in ("", []) or (isinstance(value, list) and any(item in ("", []) for item in value)):
        raise ValueError("prompt is empty: give text or token ids")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("prompt must be text, token ids, or a list of either")
    if all(isinstance(item, str) for item in value):
        return value
    if _are_ids(value):
        return [value]
    for place, item in enumerate(value):
        if not isinstance(item, list) or not _are_ids(item):
            raise ValueError(
                f"prompt must be text, token ids (integers from 0), or a list of either, and prompt[{place}] is not"
            )
    return value


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[str | list[str] | list[list[int]], PlainValidator(_read_prompt)]
    best_of: StrictInt | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    suffix: Any = None

    add_special_tokens: StrictBool = True


class ChatMessage(Strict):
    """One message; the model's chat format says what else must be true of it."""

    role: StrictStr
    content: Any = None
    name: StrictStr | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    prefix: StrictBool | None = None
    # What the answers of this and other servers carry and clients send back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class FunctionDefinition(Strict):
    """What a function does and takes."""

    name: StrictStr
    description: StrictStr | None = None
    parameters: Json | None = None
    strict: StrictBool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(Strict):
    """The name of a function."""

    name: StrictStr


class NamedTool(Strict):
    """The function that the model has to call."""

    type: Literal["function"] = "function"
    function: FunctionName


class ThinkingSwitch(Strict):
    """Whether the model thinks, as an object."""

    type: Literal["enabled", "disabled"]


class TemplateSettings(Strict):
    """Settings of the chat format."""

    thinking: StrictBool | None = None
    enable_thinking: StrictBool | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    reasoning_effort: StrictStr | StrictInt | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Any = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    # Names under which a client groups its requests: nothing here depends on them.
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    safety_identifier: StrictStr | None = None

    thinking: StrictBool | ThinkingSwitch | None = None
    chat_template_kwargs: TemplateSettings | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed with logprobs: true only")
        return self

    @property
    def wants_thinking(self) -> bool | None:
        """Whether the model is to think before it answers; None leaves it to the model."""
        if isinstance(self.thinking, ThinkingSwitch):
            return self.thinking.type == "enabled"
        if self.thinking is not None or self.chat_template_kwargs is None:
            return self.thinking
        given = self.chat_template_kwargs
        return given.thinking if given.thinking is not None else given.enable_thinking


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or the messages of a chat."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[TokenId]


# Known and not offered: the values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "audio": (None,),
    "function_call": (None,),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
