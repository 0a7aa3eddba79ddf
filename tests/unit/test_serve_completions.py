"""POST /v1/completions over a loop of straw: what comes back, and how what was asked for reaches the engine."""

import pytest

from support.fake_engine import BOS
from support.fake_loop import FakeLoop
from support.servers import events_of, post, with_client

PATH = "/v1/completions"
TEXT = "the quick brown fox"


def ask(loop=None, **fields):
    response = post(PATH, {"model": "straw", "prompt": "a", "max_tokens": 100, **fields}, loop)
    assert response.status_code == 200, response.text
    return events_of(response.text) if fields.get("stream") else response.json()


def streamed_text(events, index=0):
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)


def test_an_answer_in_one_piece():
    answer = ask(FakeLoop(num_cached_tokens=1), seed=5)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "straw"
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 19,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert answer["dspark"]["speculation"] == "running"
    assert answer["dspark"]["seed"] == 5
    assert answer["dspark"]["rounds"] == 5
    assert answer["dspark"]["num_cached_tokens"] == 1


def test_a_stream_says_the_same():
    events = ask(stream=True, seed=5, stream_options={"include_usage": True})
    assert streamed_text(events) == TEXT
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 19
    assert events[-2]["dspark"]["seed"] == 5
    assert events[-2]["dspark"]["accepted_len"] == pytest.approx(18 / 5)


def test_usage_may_come_with_each_chunk():
    events = ask(stream=True, stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 5, 9, 13, 17, 19]


def test_origins_may_come_with_each_chunk():
    events = ask(stream=True, stream_origins=True)
    assert [event["dspark"]["origins"] for event in events][:2] == [[False], [True, True, True, False]]
    assert bytes(token for event in events for token in event["dspark"]["token_ids"]).decode() == TEXT
    assert "".join(text for event in events for text in event["dspark"]["token_texts"]) == TEXT
    assert [event["dspark"]["verify_len"] for event in events][:2] == [0, 5]
    figures = ask(stream_origins=True)["dspark"]["choices"][0]
    assert bytes(figures["token_ids"]).decode() == TEXT
    assert len(figures["origins"]) == 19


def test_a_character_that_spans_tokens_is_the_text_of_the_last_of_them():
    events = ask(FakeLoop(reply_to=lambda prompt_ids, seed: "aé!"), stream=True, stream_origins=True)
    assert [text for event in events for text in event["dspark"]["token_texts"]] == ["a", "", "é", "!"]


def test_exactly_max_tokens_come_also_inside_a_block():
    answer = ask(max_tokens=3)
    assert answer["choices"][0]["text"] == "the"
    assert answer["usage"]["completion_tokens"] == 3
    assert ask(max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_after_a_stop_string_is_sent(stream):
    answer = ask(stop=["row", "n f"], stream=stream)
    text = streamed_text(answer) if stream else answer["choices"][0]["text"]
    assert text == "the quick b"
    last = answer[-1] if stream else answer
    assert last["choices"][0]["finish_reason"] == "stop"


def test_each_prompt_and_sample_has_its_place():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: f"{bytes(prompt_ids[1:]).decode()}:{seed}")
    answer = ask(loop, prompt=["a", "b"], n=2, seed=3)
    texts = [choice["text"] for choice in answer["choices"]]
    seeds = [choice["seed"] for choice in answer["dspark"]["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts == [f"a:{seeds[0]}", f"a:{seeds[1]}", f"b:{seeds[2]}", f"b:{seeds[3]}"]
    assert seeds[0] == seeds[2] == 3
    assert seeds[1] == seeds[3] != 3
    assert answer["usage"]["prompt_tokens"] == 4
    events = ask(loop, prompt=["a", "b"], n=2, seed=3, stream=True)
    assert [streamed_text(events, index) for index in range(4)] == texts


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_every_form_of_a_prompt_is_read(prompt, submitted):
    loop = FakeLoop()
    ask(loop, prompt=prompt)
    assert [prompt_ids for _, prompt_ids, _ in loop.submitted] == submitted


def test_special_tokens_can_be_left_out():
    loop = FakeLoop()
    ask(loop, prompt="ab", add_special_tokens=False)
    assert loop.submitted[0][1] == [97, 98]


def test_a_seed_is_made_up_and_reported_and_repeats_the_answer():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: f"{seed}")
    first, second = ask(loop), ask(loop)
    seed = first["dspark"]["seed"]
    assert seed != second["dspark"]["seed"]
    assert ask(loop, seed=seed)["choices"] == first["choices"]


def test_every_sampling_field_reaches_the_engine():
    loop = FakeLoop()
    ask(
        loop,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"97": -5, "98": 2.5},
        stop="zz",
        stop_token_ids=[99],
        ignore_eos=True,
        sampler="ratio",
        seed=2**63,
    )
    params = loop.submitted[0][2]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, -0.3)
    assert params.logit_bias == {97: -5.0, 98: 2.5}
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("zz",), (99,), True)
    assert (params.sampler, params.seed, params.max_tokens) == ("ratio", 2**63, 100)


def test_the_defaults_are_those_of_the_api():
    loop = FakeLoop()
    post(PATH, {"prompt": "a"}, loop)
    params = loop.submitted[0][2]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)


def test_logprobs_name_each_token_once():
    logprobs = ask(logprobs=2, max_tokens=5)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["t", "h", "e", " ", "q"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [-0.116, -0.104, -0.101, -0.032, -0.113]
    assert logprobs["top_logprobs"][0] == {"t": -0.116, "u": -1.116}


def test_a_token_outside_its_alternatives_is_listed_with_them():
    logprobs = ask(logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"t": -0.116}, {"h": -0.104}]


def test_streamed_logprobs_are_the_same_in_pieces():
    whole = ask(logprobs=1)["choices"][0]["logprobs"]
    pieces = [event["choices"][0]["logprobs"] for event in ask(logprobs=1, stream=True)]
    for name, values in whole.items():
        assert [value for piece in pieces if piece for value in piece[name]] == values


def test_parts_of_a_character_look_different_from_each_other():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: "é!")
    choice = ask(loop, logprobs=1)["choices"][0]
    assert choice["text"] == "é!"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt(prompt, stream):
    answer = ask(prompt=prompt, echo=True, stream=stream)
    assert (streamed_text(answer) if stream else answer["choices"][0]["text"]) == "ab" + TEXT


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_are_scored_as_harnesses_ask_for_it(max_tokens):
    """echo with logprobs: one entry for each prompt token, None for the first, then those of the output."""
    loop = FakeLoop()
    answer = ask(loop, prompt=[[97, 98, 99], [100, 101]], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
    first, second = answer["choices"]
    output = ["t"][:max_tokens]
    assert first["text"] == "abc" + "".join(output)
    assert first["logprobs"]["tokens"] == ["a", "b", "c", *output]
    assert first["logprobs"]["token_logprobs"] == [None, -0.098, -0.099, *[-0.116][:max_tokens]]
    assert first["logprobs"]["top_logprobs"][:2] == [None, {"b": -0.098}]
    assert first["logprobs"]["text_offset"] == [0, 1, 2, 3][: 3 + max_tokens]
    assert second["logprobs"]["tokens"] == ["d", "e", *output]
    assert first["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    assert answer["usage"]["prompt_tokens"] == 5


def test_scoring_a_prompt_can_be_streamed():
    events = ask(prompt=[97, 98, 99], echo=True, logprobs=1, max_tokens=0, stream=True)
    assert streamed_text(events) == "abc"
    assert events[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.098, -0.099]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            "json_schema",
            '{"type": "object"}',
        ),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "regex", "[0-9]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type": "object"}'),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
    ],
)
def test_a_constraint_reaches_the_engine_under_any_of_its_names(fields, kind, text):
    loop = FakeLoop()
    ask(loop, **fields)
    structured = loop.submitted[0][2].structured
    assert (structured.kind, structured.text) == (kind, text)


def test_a_stream_that_fails_ends_with_the_error():
    def fail(step):
        if step == 3:
            raise RuntimeError("the device is gone")

    response = post(PATH, {"prompt": "a", "stream": True}, FakeLoop(before_step=fail))
    *events, last = events_of(response.text)
    assert streamed_text(events) == "the q"
    assert last["error"]["code"] == "engine_dead"


def test_tokens_and_texts_are_turned_into_each_other():
    async def work(client):
        tokens = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        bare = (await client.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False})).json()
        chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        wrong = await client.post("/detokenize", json={"tokens": [999]})
        assert (await client.post("/detokenize", json={"tokens": [1] * 2049})).status_code == 400
        return tokens, bare, chat, text, wrong

    tokens, bare, chat, text, wrong = with_client(work)
    assert tokens["tokens"] == [BOS, 104, 195, 169]
    assert tokens["token_strs"] == ["<bos>", "h", "bytes:\\xc3", "bytes:\\xa9"]
    assert (tokens["count"], tokens["max_model_len"]) == (4, 2048)
    assert bare["tokens"] == [104, 195, 169]
    assert b"hi" in bytes(chat["tokens"])
    assert text == {"prompt": "hé"}
    assert wrong.status_code == 400
    assert "999" in wrong.json()["error"]["message"]
