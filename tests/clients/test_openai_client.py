"""The server as the `openai` package sees it: answers, streams, log-probabilities, samples, forms, tools, errors.

Most tests talk to `dspark serve` on the embedded model in a process of its own. What that model's chat format has no
words for (thoughts and calls) is asked of a server whose model says a fixed text in the format of the releases.
"""

import asyncio
import json
import math

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from pydantic import BaseModel, Field  # noqa: E402  (comes with both packages above)

from dspark.bench.serve_process import ServerProcess  # noqa: E402
from dspark.engine.async_engine import AsyncEngine  # noqa: E402
from dspark.serve.encoding.deepseek import DeepSeekEncoding  # noqa: E402
from dspark.serve.encoding.dialects import released_dialect  # noqa: E402
from support.fake_loop import FakeLoop, fake_assembly  # noqa: E402
from support.replies import block_text, call_text  # noqa: E402
from support.servers import live_server  # noqa: E402

KEY = "a-key-for-tests"
MESSAGES = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": "What is a page?"}]
PROMPT = "def add(a, b):\n"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def server():
    with ServerProcess(["--api-key", KEY, "--log-level", "warning", "--max-num-seqs", "8"]) as server:
        yield server
    assert server.num_tracebacks == 0, server.output
    assert server.stop() == 0


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def run_async(server, work):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
            return await work(client)

    return asyncio.run(run())


def test_the_model_is_listed(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_completion_counts_its_tokens_and_repeats_by_seed(client, model):
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5}
    first, second = (client.completions.create(**asked) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text != ""
    assert first.choices[0].finish_reason in ("length", "stop")
    usage = first.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == 12 or first.choices[0].finish_reason == "stop"
    assert usage.prompt_tokens_details.cached_tokens == 0
    other = client.completions.create(**{**asked, "seed": 6})
    assert other.choices[0].text != first.choices[0].text


def test_a_streamed_completion_is_the_same_text(client, model):
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_a_prompt_may_be_token_ids_or_several(client, model):
    answer = client.completions.create(model=model, prompt=[[5, 6, 7], [8, 9]], max_tokens=3, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    alone = client.completions.create(model=model, prompt=[8, 9], max_tokens=3, temperature=0)
    assert answer.choices[1].text == alone.choices[0].text
    assert answer.usage.prompt_tokens == 5


def test_a_chat_is_answered(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=16, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens <= 16
    assert answer.model == model and answer.object == "chat.completion"


def test_a_streamed_chat_is_the_same_text(client, model):
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 1.0, "seed": 3}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_packages_own_stream_reader_understands_the_chunks(client, model):
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=12, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content != ""


def test_many_at_once_answer_as_each_alone(server, client, model):
    """The law, over HTTP: company changes no token."""
    seeds = range(6)
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0.9}

    async def all_at_once(client):
        answers = await asyncio.gather(*(client.chat.completions.create(**asked, seed=seed) for seed in seeds))
        return [answer.choices[0].message.content for answer in answers]

    together = run_async(server, all_at_once)
    alone = [client.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in seeds]
    assert together == alone
    assert len(set(alone)) > 1


def test_an_async_stream_can_be_left_and_the_server_goes_on(server, client, model):
    async def leave(client):
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()

    run_async(server, leave)
    assert client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2).usage.completion_tokens <= 2


def test_chat_log_probabilities_are_those_of_the_tokens(client, model):
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(**asked, top_logprobs=3)
    listed = answer.choices[0].logprobs.content
    assert len(listed) == answer.usage.completion_tokens
    for token in listed:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs)  # greedy takes the most likely
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1 + 1e-6
    text = b"".join(bytes(token.bytes) for token in listed).decode()
    assert text.startswith(answer.choices[0].message.content)
    chunks = list(client.chat.completions.create(**asked, top_logprobs=3, stream=True))
    parts = [c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs]
    assert [token.logprob for part in parts for token in part] == [token.logprob for token in listed]


def test_completion_log_probabilities_cover_an_echoed_prompt(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2, echo=True)
    listed = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(PROMPT)
    assert listed.token_logprobs[0] is None and all(value <= 0 for value in listed.token_logprobs[1:])
    assert len(listed.tokens) == len(listed.token_logprobs) == len(listed.top_logprobs) == len(listed.text_offset)
    assert len(listed.tokens) == answer.usage.total_tokens


def test_samples_differ_and_each_is_complete(client, model):
    asked = {"model": model, "messages": MESSAGES, "n": 3, "max_tokens": 12, "temperature": 1.2, "seed": 4}
    answer = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    single = client.chat.completions.create(**{**asked, "n": 1})
    assert single.choices[0].message.content == texts[0]


def test_a_stop_string_ends_the_text_before_it(client, model):
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 4]
    for stream in (False, True):
        answer = client.completions.create(**asked, stop=[stop], stream=stream)
        text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
        assert text == free[: free.index(stop)]
    assert client.completions.create(**asked, stop=stop).choices[0].finish_reason == "stop"


class Thing(BaseModel):
    """What the model has to answer."""

    name: str = Field(max_length=8)
    size: int = Field(ge=0, le=999)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def test_an_answer_keeps_to_a_json_schema(client, model):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 120, "response_format": form}
    for temperature in (0, 1):
        answer = client.chat.completions.create(**asked, temperature=temperature, seed=1)
        assert answer.choices[0].finish_reason == "stop"
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"name", "size"} and len(value["name"]) <= 8 and 0 <= value["size"] <= 99
    chunks = client.chat.completions.create(**asked, temperature=1, seed=1, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content


def test_the_package_parses_an_answer_into_a_class(client, model):
    pytest.importorskip("llguidance")
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, max_tokens=120, temperature=0, response_format=Thing
    )
    assert isinstance(answer.choices[0].message.parsed, Thing)


def test_any_json_object_begins_as_one(client, model):
    pytest.importorskip("llguidance")
    form = {"type": "json_object"}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=60, temperature=0, response_format=form
    )
    text = answer.choices[0].message.content
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_fields_of_this_server_go_through_extra_body(client, model):
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=9, temperature=0, extra_body={"ignore_eos": True, "stream_origins": True}
    )
    figures = answer.model_extra["dspark"]
    assert figures["rounds"] >= 1 and figures["accepted_len"] >= 1
    assert len(figures["choices"][0]["token_ids"]) == answer.usage.completion_tokens == 9


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"temperature": 99.0, "top_p": 7.0}, openai.BadRequestError),
        ({"prompt": []}, openai.BadRequestError),
        ({"prompt": [1] * 5000}, openai.BadRequestError),
        ({"model": "another"}, openai.NotFoundError),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError),
    ],
)
def test_mistakes_become_the_packages_exceptions(client, model, fields, kind):
    with pytest.raises(kind) as raised:
        client.completions.create(**{"model": model, "prompt": PROMPT, "max_tokens": 2, **fields})
    assert raised.value.body["message"] and raised.value.body["type"]
    assert raised.value.request_id


def test_a_wrong_key_is_an_authentication_error(server):
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_tools_without_words_for_them_are_refused_in_a_sentence(client, model):
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS, max_tokens=4)


DIALECT = released_dialect("deepseek_v41", None)
CALL = call_text(DIALECT, "look_up", ("word", "true", "tau"), ("limit", "false", "2"))
REPLY = f"I look it up.{block_text(DIALECT, CALL)}"


@pytest.fixture
def caller(monkeypatch):
    """A client of a model that calls a tool, after a thought where it is asked to think."""
    monkeypatch.setattr("dspark.serve.service.chat_encoding", lambda folder: DeepSeekEncoding(DIALECT))

    def reply_to(prompt_ids, seed):
        thinks = bytes(prompt_ids).decode(errors="replace").rstrip().endswith("<think>")
        return f"A rare word.</think>{REPLY}" if thinks else REPLY

    # The script ends by itself, as a model does with its end of sequence.
    engine = AsyncEngine.over(fake_assembly(FakeLoop(reply_to=reply_to, max_model_len=8192)))
    with live_server(engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)
        with client:
            yield client


def test_a_call_of_a_tool_is_read(caller):
    answer = caller.chat.completions.create(
        model="straw", messages=MESSAGES, tools=TOOLS, max_tokens=2000, extra_body={"thinking": False}
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "look_up")
    assert json.loads(call.function.arguments) == {"word": "tau", "limit": 2}
    assert answer.choices[0].message.content.strip() == "I look it up."


def test_a_streamed_call_comes_in_pieces_that_make_the_same(caller):
    asked = {"model": "straw", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 2000}
    name, arguments, content = "", "", ""
    for chunk in caller.chat.completions.create(**asked, stream=True, extra_body={"thinking": False}):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "look_up" and json.loads(arguments) == {"word": "tau", "limit": 2}
    assert content.strip() == "I look it up."


def test_thoughts_stand_beside_the_answer(caller):
    answer = caller.chat.completions.create(
        model="straw", messages=MESSAGES, max_tokens=2000, extra_body={"thinking": True}
    )
    message = answer.choices[0].message
    assert message.model_extra["reasoning_content"] == "A rare word."
    assert message.content.startswith("I look it up.") and message.tool_calls is None


def test_the_result_of_a_tool_goes_back_into_the_dialogue(caller):
    called = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "tau"}'}}
    dialogue = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call-1", "content": "a letter"},
    ]
    answer = caller.chat.completions.create(
        model="straw", messages=dialogue, tools=TOOLS, max_tokens=2000, extra_body={"thinking": False}
    )
    assert answer.choices[0].message.tool_calls
