"""POST /v1/chat/completions over a loop of straw: the messages' way in, and the reply's parts on their way out."""

import pytest

from dspark.config import StructuredOutput
from dspark.serve.chat import Reply
from dspark.serve.encoding import ReplyDelta, ToolCallDelta
from dspark.serve.service import Service
from support.fake_loop import FakeLoop
from support.servers import events_of, post, with_client

PATH = "/v1/chat/completions"
TEXT = "the quick brown fox"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


class ScriptedParser:
    """Every letter is a part of its own: digits are thoughts, brackets a call, the rest is content."""

    def __init__(self) -> None:
        self.has_tool_calls = False

    def push(self, text):
        return [self._part(letter) for letter in text]

    def finish(self):
        return []

    def _part(self, letter):
        if letter == "{":
            self.has_tool_calls = True
            return ReplyDelta(tool_call=ToolCallDelta(0, "call-0", "look_up", ""))
        if letter in "}:":
            return ReplyDelta(tool_call=ToolCallDelta(0, None, None, letter))
        return ReplyDelta(reasoning=letter) if letter.isdigit() else ReplyDelta(content=letter)


@pytest.fixture
def scripted(monkeypatch):
    """Any chat format takes tools, and replies are read by `ScriptedParser`."""

    class Encoding:
        supports_tools = True
        supports_reasoning = True

        def __init__(self):
            self.asked = []

        def pieces(self, messages, **settings):
            self.asked.append((messages, settings))
            return ()

        def parser(self, **settings):
            return ScriptedParser()

        def reply_grammar(self, *, tool_choice, **settings):
            return None if tool_choice == "auto" else "start: /x/"

    encoding = Encoding()
    monkeypatch.setattr(Service, "require_chat", lambda service: encoding)
    monkeypatch.setattr("dspark.serve.prompting.piece_ids", lambda tokenizer, pieces: [1, 2, 3])
    return encoding


def ask(loop=None, **fields):
    response = post(PATH, {"messages": MESSAGES, **fields}, loop)
    assert response.status_code == 200, response.text
    return events_of(response.text) if fields.get("stream") else response.json()


def test_an_answer_in_one_piece():
    loop = FakeLoop()
    answer = ask(loop)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    prompt = bytes(loop.submitted[0][1]).decode()
    assert prompt == "<|bos|><|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert loop.submitted[0][2].max_tokens == loop.max_model_len - len(prompt)
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_the_limit_has_two_names():
    assert ask(max_tokens=3)["choices"][0]["message"]["content"] == "the"
    assert ask(max_completion_tokens=3)["choices"][0]["message"]["content"] == "the"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason():
    events = ask(stream=True, stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert events[-1]["usage"]["completion_tokens"] == 19
    assert events[-2]["dspark"]["speculation"] == "running"


def test_samples_are_streamed_side_by_side():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: f"{seed}")
    events = ask(loop, stream=True, n=3, seed=1)
    texts = ["", "", ""]
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    whole = ask(loop, n=3, seed=1)
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert len(set(texts)) == 3


def test_logprobs_hold_the_bytes_of_each_token():
    content = ask(logprobs=True, top_logprobs=2, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "t",
        "logprob": -0.116,
        "bytes": [116],
        "top_logprobs": [
            {"token": "t", "logprob": -0.116, "bytes": [116]},
            {"token": "u", "logprob": -1.116, "bytes": [117]},
        ],
    }
    events = ask(logprobs=True, top_logprobs=2, stream=True)
    listed = [one for event in events for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(one["token"] for one in listed) == TEXT


def test_origins_come_with_each_emission_once():
    events = ask(stream=True, stream_origins=True)
    ids = [token for event in events for token in event.get("dspark", {}).get("token_ids", [])]
    assert bytes(ids).decode() == TEXT


def test_content_may_come_in_parts():
    loop = FakeLoop()
    ask(loop, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}])
    assert b"x\n\ny" in bytes(loop.submitted[0][1])


def test_an_answer_can_be_sent_back():
    message = ask()["choices"][0]["message"]
    sent_back = [*MESSAGES, {**message, "annotations": [], "audio": None, "function_call": None}]
    assert ask(messages=[*sent_back, {"role": "user", "content": "go on"}])


def test_thoughts_calls_and_content_are_told_apart(scripted):
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: "12a{:}", accepted=5)
    answer = ask(loop, tools=TOOLS)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "12"
    assert message["content"] == "a"
    assert message["tool_calls"] == [
        {"id": "call-0", "type": "function", "function": {"name": "look_up", "arguments": ":}"}}
    ]
    assert answer["choices"][0]["finish_reason"] == "length"
    messages, settings = scripted.asked[0]
    assert messages == MESSAGES
    assert settings["tools"] == TOOLS
    assert settings["tool_choice"] == "auto"


def test_tokens_that_were_thought_are_counted(scripted):
    """Also in characters of several bytes, and while the stream goes on."""
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: "1²3ab", accepted=1)
    answer = ask(loop, n=2)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * 4}
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        (each["usage"]["completion_tokens"], each["usage"]["completion_tokens_details"]["reasoning_tokens"])
        for each in ask(loop, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == (6, 4)


def test_a_model_that_does_not_think_counts_no_thoughts():
    assert "completion_tokens_details" not in ask()["usage"]


def test_calls_are_streamed_in_pieces(scripted):
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: "1a{:}", accepted=5)
    deltas = [event["choices"][0]["delta"] for event in ask(loop, tools=TOOLS, stream=True)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert {"reasoning_content": "1"} in deltas
    assert {"content": "a"} in deltas
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0] == {
        "index": 0,
        "id": "call-0",
        "type": "function",
        "function": {"name": "look_up", "arguments": ""},
    }
    assert "".join(call["function"]["arguments"] for call in calls) == ":}"


def test_a_reply_that_stops_after_a_call_says_so():
    reply = Reply(ScriptedParser())
    reply.take("{:}", is_final=True)
    assert reply.finish_reason("stop") == "tool_calls"
    assert reply.finish_reason("length") == "length"
    assert reply.message()["content"] is None


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, False),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_thinking_is_turned_off_where_there_is_no_room_for_it(scripted, fields, thinking):
    ask(**fields)
    assert scripted.asked[0][1]["thinking"] is thinking


@pytest.mark.parametrize(("choice", "form"), [("auto", None), ("required", StructuredOutput.grammar("start: /x/"))])
def test_the_form_of_a_forced_call_reaches_the_engine(scripted, choice, form):
    loop = FakeLoop()
    ask(loop, tools=TOOLS, tool_choice=choice, n=2)
    assert [params.structured for _, _, params in loop.submitted] == [form, form]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "tools": TOOLS},
        {"response_format": {"type": "json_object"}, "thinking": True},
        {"guided_regex": "a", "reasoning_effort": "high"},
        {"tools": TOOLS, "parallel_tool_calls": False},
    ],
)
def test_what_excludes_each_other_is_refused(scripted, fields):
    response = post(PATH, {"messages": MESSAGES, **fields})
    assert response.status_code == 400


def test_a_model_without_a_chat_format_says_so():
    async def work(client):
        service = client._transport.app.state.service
        service.chat, service.chat_refusal = None, "this model continues text and does not chat"
        return await client.post(PATH, json={"messages": MESSAGES})

    response = with_client(work)
    assert response.status_code == 400
    assert "does not chat" in response.json()["error"]["message"]
