"""The server over a real engine: each answer is what the model says alone, whoever else is served."""

import asyncio
import contextlib
import json

import httpx
import pytest

from dspark import SamplingParams, SpeculativeConfig
from dspark.config.sampling import sample_seed
from dspark.engine import LLM, embedded_folder
from dspark.engine.async_engine import AsyncEngine
from dspark.engine.tokenizer import TextTokenizer
from dspark.serve.app import create_app
from dspark.serve.encoding.deepseek import DeepSeekEncoding
from dspark.serve.encoding.dialects import V41
from dspark.serve.service import Service
from dspark.serve.settings import ServerSettings
from support.servers import events_of
from support.tiny_checkpoints import write_tiny_checkpoint

COMPLETIONS = "/v1/completions"
SIZES = {"max_model_len": 96, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def alone(folder):
    """The model decoding one request at a time, plainly."""
    return LLM(folder, draft="off", max_num_seqs=1, enable_prefix_caching=False, **SIZES)


@contextlib.asynccontextmanager
async def serving(folder, **config):
    engine = AsyncEngine(folder, **{"max_num_seqs": 6, **SIZES, **config})
    app = create_app(engine, ServerSettings())
    async with engine, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
        yield client, engine
        status = (await engine.refresh()).loop
        assert (status.num_running, status.num_waiting) == (0, 0)
        engine.assembly.loop.clear_cache()
        engine.assembly.loop.check_integrity()
        assert engine.assembly.loop.status().num_free_pages == status.num_pages


def prompt_of(number):
    return [3 + (number * 7 + place * place) % 40 for place in range(5 + number % 9)]


def fields_of(number):
    """Parameters that differ from request to request."""
    return {
        "temperature": [0.0, 0.7, 1.3][number % 3],
        "seed": number,
        "max_tokens": 5 + number % 7,
        "presence_penalty": 0.5 * (number % 2),
        "ignore_eos": True,
        "logprobs": 2,
    }


def test_many_requests_at_once_say_what_each_says_alone(folder, alone):
    """Streams and answers in one piece, more than fit at once, some stopped and replayed, and leavers between them."""
    numbers = range(64)
    expected = [alone.generate(prompt_of(number), SamplingParams(**fields_of(number)))[0] for number in numbers]

    async def one(client, number):
        body = {"prompt": prompt_of(number), "stream": number % 2 == 0, "stream_origins": True, **fields_of(number)}
        response = await client.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        if not body["stream"]:
            answer = response.json()
            logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            return answer["choices"][0]["text"], answer["dspark"]["choices"][0]["token_ids"], logprobs
        text, token_ids, logprobs = "", [], []
        for event in events_of(response.text):
            text += event["choices"][0]["text"]
            token_ids += event["dspark"]["token_ids"]
            logprobs += (event["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        return text, token_ids, logprobs

    async def leave(engine, number):
        async for _ in engine.generate(prompt_of(number), SamplingParams(**fields_of(number))):
            break

    async def disturb(engine):
        while True:
            await asyncio.sleep(0.05)
            await engine._post(lambda loop: [loop.preempt(name) for name in loop.scheduler.running[-1:]])

    async def main():
        async with serving(folder, max_num_pages=9) as (client, engine):
            disturber = asyncio.ensure_future(disturb(engine))
            leavers = [asyncio.ensure_future(leave(engine, number)) for number in range(30)]
            answers = await asyncio.gather(*(one(client, number) for number in numbers))
            await asyncio.gather(*leavers)
            disturber.cancel()
            assert (await engine.refresh()).loop.num_preemptions > 0
            return answers

    for completion, (text, token_ids, logprobs) in zip(expected, asyncio.run(main()), strict=True):
        assert text == completion.text
        assert token_ids == completion.token_ids
        assert logprobs == [found.token for found in completion.logprobs]


def test_samples_have_seeds_of_their_own(folder, alone):
    prompt = prompt_of(4)

    async def main():
        async with serving(folder) as (client, _):
            body = {"prompt": prompt, "n": 4, "seed": 9, "max_tokens": 12, "ignore_eos": True, "stream_origins": True}
            return (await client.post(COMPLETIONS, json=body)).json()["dspark"]["choices"]

    for index, choice in enumerate(asyncio.run(main())):
        params = SamplingParams(temperature=1.0, seed=sample_seed(9, index), max_tokens=12, ignore_eos=True)
        assert choice["token_ids"] == alone.generate(prompt, params)[0].token_ids
        assert choice["seed"] == params.seed


def test_a_second_turn_comes_from_the_cache_and_says_the_same():
    body = {"prompt": "def add(a, b):\n    return a + b\n\n" * 12, "max_tokens": 10, "temperature": 0}

    async def main():
        async with serving(None, max_model_len=512) as (client, _):
            return [(await client.post(COMPLETIONS, json=body)).json() for _ in range(2)]

    cold, warm = asyncio.run(main())
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert warm["dspark"]["num_cached_tokens"] == warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cold["choices"] == warm["choices"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_are_scored_exactly(folder, alone, max_tokens):
    """The value of each prompt token is that of the same token when it is emitted after the tokens before it."""
    prompts = [prompt_of(number) for number in range(5)]
    biased = [
        alone.generate(
            prompt[:place],
            SamplingParams(max_tokens=1, logprobs=1, logit_bias={prompt[place]: 1e4}),
        )[0].logprobs[0]
        for prompt in prompts
        for place in range(1, len(prompt))
    ]

    async def main():
        async with serving(folder) as (client, _):
            body = {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
            return (await client.post(COMPLETIONS, json=body)).json()["choices"]

    choices = asyncio.run(main())
    found = [choice["logprobs"] for choice in choices]
    assert [len(one["token_logprobs"]) for one in found] == [len(prompt) + max_tokens for prompt in prompts]
    scored = [
        value for one, prompt in zip(found, prompts, strict=True) for value in one["token_logprobs"][1 : len(prompt)]
    ]
    assert scored == [one.token for one in biased]
    best = [top for one, prompt in zip(found, prompts, strict=True) for top in one["top_logprobs"][1 : len(prompt)]]
    assert [max(top.values()) for top in best] == [one.top[0][1] for one in biased]


def test_constraints_hold():
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"prompt": "x =", "seed": 4, "max_tokens": 60}

    async def main():
        async with serving(None, max_model_len=128) as (client, _):
            wrong = await client.post(COMPLETIONS, json={**body, "guided_regex": "("})
            assert wrong.status_code == 400, wrong.text
            choice = await client.post(COMPLETIONS, json={**body, "guided_choice": ["yes", "no"]})
            shaped = await client.post(COMPLETIONS, json={**body, "response_format": wanted})
            return choice.json(), shaped.json()

    choice, shaped = asyncio.run(main())
    assert choice["choices"][0]["text"] in ("yes", "no")
    assert choice["choices"][0]["finish_reason"] == "stop"
    assert json.loads(shaped["choices"][0]["text"])["n"] in (1, 2)


def test_a_chat_may_take_what_the_pages_hold():
    """A request without a limit of its own gets what fits; one whose own limit never fits is refused."""

    async def main():
        async with serving(None, max_num_pages=2, max_num_seqs=2, max_model_len=1024) as (client, engine):
            assert engine.max_len < engine.max_model_len
            refused = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1000})
            body = {
                "messages": [{"role": "user", "content": "hi"}],
                "temperature": 0,
                "stop_token_ids": list(range(64)),
            }
            return refused, await client.post("/v1/chat/completions", json=body)

    refused, chat = asyncio.run(main())
    assert refused.status_code == 400
    assert "pages" in refused.json()["error"]["message"]
    assert chat.status_code == 200, chat.text


def test_forced_acceptance_says_that_the_text_is_meaningless():
    async def main():
        settings = SpeculativeConfig(spec_decode_acceptance_length=3.0)
        async with serving(None, max_model_len=128, speculative_config=settings) as (client, _):
            return (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 4})).json()

    assert "meaningless" in asyncio.run(main())["dspark"]["speculation"]


def test_a_long_text_has_the_same_tokens_and_at_least_so_many():
    tokenizer = TextTokenizer(embedded_folder())
    text = "def add(a, b):\n    return a + b  # \u4f60\u597d <|end|>\n" * 200
    parts = [tokenizer.encode(line) for line in text.splitlines(keepends=True)]
    assert tokenizer.encode(text) == [token for part in parts for token in part]
    assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode_plain(text))
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


EXTREMES = {
    "temperature": [0, 5e-324, 1e-38, 100],
    "top_p": [5e-324, 1e-20, 1],
    "top_k": [1, 2**31 - 1, 2**70],
    "min_p": [5e-324, 1],
    "repetition_penalty": [5e-324, 1e-38, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [{"5": -1e4}, {"5": 1e4, "6": 1e4}, {str(token): -1e4 for token in range(40)}],
    "logprobs": [0, 64],
    "seed": [0, 2**64 - 1],
    "max_tokens": [10**30],
    "priority": [-1000, 1000],
}


def test_no_extreme_value_brings_the_engine_down(folder):
    """Each extreme of each number, under both samplers: the answer is one, or a refusal, and the engine goes on."""

    async def main():
        async with serving(folder, max_model_len=24, max_num_batched_tokens=36) as (client, engine):
            for name, values in EXTREMES.items():
                bodies = [
                    {"prompt": [3, 4, 5], "max_tokens": 4, "sampler": sampler, name: value}
                    for value in values
                    for sampler in ("keyed", "ratio")
                ]
                for response in await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies)):
                    assert response.status_code in (200, 400), (name, response.text)
            assert engine.status().state != "dead"

    asyncio.run(main())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_forced_call_is_one_also_by_a_model_that_never_saw_one(monkeypatch, choice, stream):
    """The embedded model knows nothing of this format; drafts are on."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(Service, "require_chat", lambda service: DeepSeekEncoding(V41))
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in (("look_up", {"word": {}}), ("stop", {}))
    ]

    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice, "seed": 3}

    async def main():
        async with serving(None, max_model_len=1024) as (client, _):
            return await client.post("/v1/chat/completions", json={**body, "max_tokens": 200, "stream": stream})

    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    if stream:
        deltas = [piece["choices"][0]["delta"] for piece in events_of(answer.text)]
        assert not any(delta.get("content") for delta in deltas)
        names = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    else:
        message = answer.json()["choices"][0]["message"]
        assert message["content"] is None
        names = [call["function"]["name"] for call in message["tool_calls"]]
        assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert names
    assert set(names) <= ({"look_up", "stop"} if choice == "required" else {"look_up"})
