"""Whatever a client sends, it gets an error in OpenAI's shape that names what is wrong, and the server goes on."""

import asyncio
import gzip
import json
import time

import pytest

from dspark.serve.protocol import ChatMessage, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from support.fake_loop import FakeLoop, failing_at, sleeping
from support.servers import post, straw_client, with_client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(path, body, status=400, loop=None, headers=None, **settings):
    """The error of a POST that must be refused; afterwards the same app still answers."""

    async def work(client):
        if isinstance(body, bytes):
            sent = await client.post(
                path, content=body, headers={"Content-Type": "application/json", **(headers or {})}
            )
        else:
            sent = await client.post(path, json=body, headers=headers)
        good = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2})
        assert good.status_code == 200
        return sent

    response = with_client(work, loop, **settings)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"', "line 1, column"),
        (b"\xff\xfe{}", "UTF-8 at byte 0"),
        (b'{"prompt": "\xc3"}', "UTF-8 at byte 12"),
        (b"[]", "a JSON object, not a list"),
        (b"null", "not null"),
        (b'"text"', "not a string"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}", "too long"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"prompt": "a", "guided_json": ' + b'{"a":' * 70 + b"1" + b"}" * 71, "nested deeper than 64"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "model": "\\ud800"}', "\\ud800"),
        (b'{"prompt": "a", "\\udfff": 1}', "\\udfff"),
        (b'{"prompt": [{"\\ud83d\\ude00": 1}]}', "prompt[0]"),
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "'max_tokens' twice"),
        (b'{"prompt": "a", "guided_json": {"x": {"y": 1, "z": 2, "y": 3}}}', "'y' twice"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature"),
        (b'{"prompt": "a", "logit_bias": {"1": 1' + b"0" * 400 + b"}}", "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"1": 5, "01": -5}}', "'01' is no token id"),
    ],
)
def test_a_body_that_is_no_good_json(body, words):
    assert words in refusal(COMPLETIONS, body)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "unknown field temprature; did you mean temperature?"),
        ({"stream_options": {"include_usages": True}, "stream": True}, None, "did you mean include_usage?"),
        ({"prompt": []}, None, "empty"),
        ({"prompt": [[]]}, None, "empty"),
        ({"prompt": ""}, None, "empty"),
        ({"prompt": ["a", ""]}, None, "empty"),
        ({"prompt": 5}, None, "prompt must be text"),
        ({"prompt": ["a", 5]}, None, "prompt[0]"),
        ({"prompt": [1, True]}, None, "prompt[0]"),
        ({"prompt": [-1]}, None, "prompt[0]"),
        ({"prompt": None}, None, "prompt"),
        ({"prompt": [1] * 3000}, None, "3000 tokens and the context holds 2048"),
        ({"prompt": "x" * 3000}, "prompt", "at least 3000 tokens and the context holds 2048"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"temperature": -1}, "temperature", "between 0.0 and 100.0"),
        ({"temperature": True}, "temperature", ""),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "between 0"),
        ({"top_k": 2**70}, "top_k", "between 0"),
        ({"min_p": 2}, "min_p", "between"),
        ({"presence_penalty": 3}, "presence_penalty", "between"),
        ({"logprobs": 65}, "logprobs", "between 0 and 64"),
        ({"seed": -1}, "seed", "between 0"),
        ({"seed": 2**64}, "seed", "between 0"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["a", ""]}, "stop", "non-empty"),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias", "between"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
        ({"best_of": 3}, "best_of", "best_of is 3 and n is 1"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"sampler": "greedy"}, "sampler", "keyed, ratio"),
        ({"stream_options": {"include_usage": True}}, None, "stream: true only"),
        ({"response_format": {"type": "json_schema"}}, None, "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both constrain"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"prompt": ["a"] * 9}, None, "9 samples were asked for at once"),
    ],
)
def test_a_field_that_is_no_good(fields, param, words):
    error = refusal(COMPLETIONS, {"prompt": "a", **fields}, max_waiting=4)
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


def test_a_missing_prompt_is_named():
    assert refusal(COMPLETIONS, {"model": "straw"})["message"] == "prompt is missing"


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1},
        {"suffix": None},
        {"suffix": ""},
        {"user": "me"},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"top_k": -1},
        {"n": None},
    ],
)
def test_a_neutral_value_passes(fields):
    assert post(COMPLETIONS, {"prompt": "a", **fields}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae; did you mean name?"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
                ]
            },
            "text only",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "context holds 2048"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "they mean the same"),
        ({"top_logprobs": 2}, "logprobs: true only"),
        ({"logprobs": True, "top_logprobs": 65}, "between 0 and 64"),
        ({"logprobs": 1}, "logprobs"),
        ({"store": True}, "store is not supported"),
        ({"audio": {}}, "audio is not supported"),
        ({"modalities": ["text", "audio"]}, "modalities is not supported"),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "not trained to call them"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        ({"reasoning_effort": "high"}, "does not think"),
        ({"thinking": True}, "does not think"),
    ],
)
def test_a_chat_that_is_no_good(fields, words):
    assert words in refusal(CHAT, {"messages": MESSAGES, **fields})["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_an_unknown_model_is_not_found(path):
    content = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    content = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}.get(path, content)
    error = refusal(path, {**content, "model": "strew"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "did you mean 'straw'" in error["message"]


def test_more_prompts_than_fit_are_refused_unread():
    """A body may hold a million of them; not one is encoded."""

    async def work(client):
        client.engine.tokenizer.encode = None
        return await client.post(COMPLETIONS, json={"prompt": ["a"] * 50_000, "n": 2})

    response = with_client(work, max_waiting=4)
    assert response.status_code == 400
    assert "100000 samples were asked for at once and this server holds 8" in response.text


def test_an_encoded_body_is_refused():
    error = refusal(COMPLETIONS, gzip.compress(b'{"prompt": "a"}'), 415, headers={"Content-Encoding": "gzip"})
    assert "encoded as 'gzip': send it as it is" in error["message"]


def test_another_content_type_is_refused():
    assert refusal(COMPLETIONS, b"prompt=a", 415, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert refusal(COMPLETIONS, b"{}", 400, headers={"Content-Type": "application/json; charset=utf-8"})


def test_wrong_methods_and_paths():
    async def work(client):
        return (
            await client.get(COMPLETIONS),
            await client.get("/v1/nothing"),
            await client.get("/page/../../pyproject.toml"),
        )

    method, path, escape = with_client(work)
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (path.status_code, path.json()["error"]["code"]) == (404, "not_found")
    assert escape.status_code == 404


def test_a_long_body_is_refused_by_its_length_and_by_its_bytes():
    long = json.dumps({"prompt": "a" * 5000}).encode()
    assert "1024 bytes" in refusal(COMPLETIONS, long, 413, max_body_bytes=1024)["message"]

    async def in_chunks():
        for _ in range(5):
            yield b"a" * 1000

    async def work(client):
        return await client.post(COMPLETIONS, content=in_chunks(), headers={"Content-Type": "application/json"})

    response = with_client(work, max_body_bytes=1024)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_too_many_waiting_requests_are_asked_to_come_again():
    loop = FakeLoop(before_step=sleeping(0.01), max_num_seqs=1)

    async def work(client):
        body = {"prompt": "a", "max_tokens": 50}
        return await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(6)))

    responses = with_client(work, loop, max_waiting=2)
    assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 3
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_time_limit(stream):
    loop = FakeLoop(before_step=sleeping(0.05))

    async def work(client):
        began = time.monotonic()
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert time.monotonic() - began < 2
        await client.engine.refresh()
        assert not loop.requests
        return response

    response = with_client(work, loop, request_timeout_s=0.08)
    if stream:
        assert '"code":"request_timeout"' in response.text
    else:
        assert response.status_code == 408
        assert response.json()["error"]["code"] == "request_timeout"


def test_a_dead_engine_is_said_to_be_dead():
    async def work(client):
        body = {"prompt": "a", "max_tokens": 50}
        died = await client.post(COMPLETIONS, json=body)
        after = await client.post(COMPLETIONS, json={**body, "stream": True})
        return died, after, await client.get("/health"), await client.get("/metrics")

    died, after, health, metrics = with_client(work, FakeLoop(before_step=failing_at(2)))
    assert died.status_code == after.status_code == health.status_code == 503
    assert after.json()["error"]["code"] == "engine_dead"
    assert health.json()["status"] == "dead"
    assert 'dspark:engine_state{model_name="straw",state="dead"} 1.0' in metrics.text


def test_a_draining_engine_refuses_and_says_so():
    async def work(client):
        await client.engine.drain(1)
        return await client.post(COMPLETIONS, json={"prompt": "a"}), await client.get("/health")

    refused, health = with_client(work)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert (health.status_code, health.json()["status"]) == (503, "draining")


def test_what_nobody_foresaw_is_answered_without_its_details():
    class Broken(FakeLoop):
        def add_samples(self, *positional, **named):
            raise KeyError("secret")

    response = post(COMPLETIONS, {"prompt": "a"}, Broken())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"


def test_no_prompt_is_logged(caplog):
    caplog.set_level("DEBUG", logger="dspark")

    async def main():
        async with straw_client() as client:
            await client.post(COMPLETIONS, json={"prompt": "confidential", "stream": True})
            await client.post(COMPLETIONS, json={"prompt": ["confidential"], "temperature": "confidential"})
            await client.post(CHAT, json={"messages": [{"role": "user", "content": "confidential"}]})

    asyncio.run(main())
    assert len(caplog.records) > 3
    assert "confidential" not in caplog.text


ODD_VALUES = [
    None, True, False, 0, -1, 1, 2**63, 10**40, 10**400, 0.5, -0.0, 1e308, "", "x", "\ufdd0",
    [], [None], [[]], [{}], ["x"], [1],
    {}, {"type": "x"}, {"x": {"x": []}}, [[1, "x"]], [{"role": "user", "content": None}], {"json": {"type": "x"}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "model", "good"),
    [
        (COMPLETIONS, CompletionRequest, {"prompt": "a", "max_tokens": 2}),
        (CHAT, ChatRequest, {"messages": MESSAGES, "max_tokens": 2}),
        ("/tokenize", TokenizeRequest, {"prompt": "a"}),
        ("/detokenize", DetokenizeRequest, {"tokens": [97]}),
    ],
)
def test_no_value_of_any_field_is_more_than_the_client_s_mistake(path, model, good):
    """Each field of each request with each odd value: an answer, or an error that is the client's."""

    async def work(client):
        for name in model.model_fields:
            for value in ODD_VALUES:
                response = await client.post(path, json={**good, name: value})
                assert response.status_code in (200, 400, 404), (name, value, response.text)
                if response.status_code != 200:
                    assert response.json()["error"]["message"], (name, value)
        await client.engine.refresh()
        assert client.engine.status().num_requests == 0

    with_client(work, FakeLoop())


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "x", None])
def test_no_message_is_more_than_the_client_s_mistake(role):
    async def work(client):
        for name in (*ChatMessage.model_fields, "unknown"):
            for value in ODD_VALUES:
                message = {"role": role, "content": "x", name: value}
                response = await client.post(CHAT, json={"messages": [*MESSAGES, message], "max_tokens": 2})
                assert response.status_code in (200, 400), (name, value, response.text)

    with_client(work, FakeLoop())
