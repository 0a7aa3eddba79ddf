"""However a reply is cut into pieces, the same parts come out, and every character that is not markup is in them."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dspark.serve.encoding.deepseek import DeepSeekEncoding
from dspark.serve.encoding.dialects import V4, V41
from support.replies import block_text, call_text, hear, parser_of

DIALECTS = [V4, V41]
CALL = call_text(V41, "f", ("a", "true", 'x\n"\\é'), ("b", "false", '{"c": [1, "</think>"]}'), ("d", "false", "{oops"))
# The pieces that replies are made of, whole and broken, so that drawn texts come near every rule.
FRAGMENTS = st.sampled_from(
    ["\n", "\n\n", " ", "a", "é", "<", "</think>", "<think>", '"', ">", "｜DSML｜", "{", "1"]
    + [
        part
        for name in (V41.block, V41.invoke, V41.parameter)
        for part in (f"<{name}>", f"</{name}>", f"<{name}", name)
    ]
    + [f'<{V41.invoke} name="f">', f'<{V41.parameter} name="a" string="true">', f'<{V41.parameter} name="b">', CALL]
    + [block_text(V41, CALL), f"\n\n<{V41.block}>\n"]
)
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)
SETTINGS = st.fixed_dictionaries(
    {"thinks": st.booleans(), "takes_calls": st.booleans()}, optional={"starts_in_calls": st.booleans()}
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=["tags joined", "tags spaced"])
def test_every_place_to_cut_a_reply_gives_the_same_parts(dialect):
    call = call_text(dialect, "f", ("a", "true", 'x\n"'), ("b", "false", "[1]"))
    text = "hm</think>ok" + block_text(dialect, call, call) + "\n\nend\n"
    whole = hear(parser_of(dialect, thinks=True), [text])
    assert len(whole.calls) == 2
    for place in range(len(text) + 1):
        assert hear(parser_of(dialect, thinks=True), [text[:place], text[place:]]) == whole
    assert hear(parser_of(dialect, thinks=True), text) == whole


@given(TEXTS, SETTINGS, st.data())
@example("\n\n" + f"<{V41.block}>" * 2, {"thinks": False, "takes_calls": True}, None)
def test_any_text_cut_anywhere_gives_the_same_parts(text, settings, data):
    whole = hear(parser_of(V41, **settings), [text])
    assert hear(parser_of(V41, **settings), text) == whole
    if data is not None:
        places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
        assert hear(parser_of(V41, **settings), pieces) == whole


@given(TEXTS, SETTINGS)
def test_without_a_call_nothing_but_the_end_of_thoughts_is_taken_out(text, settings):
    heard = hear(parser_of(V41, **settings), [text])
    if not heard.calls and not settings.get("starts_in_calls"):
        mark = "</think>" if settings["thinks"] and "</think>" in text else ""
        assert heard.reasoning + mark + heard.content == text


@given(st.text(alphabet='ab<>\n"é漢\\{}[]1', max_size=40), st.booleans(), st.booleans())
def test_arguments_of_a_finished_call_are_json_whatever_the_value(value, is_string, closes):
    kind = "true" if is_string else "false"
    call = call_text(V41, "f", ("a", kind, value), ("b", "true", value))
    text = block_text(V41, call if closes else call.replace(f"</{V41.invoke}>\n", ""))
    arguments = hear(parser_of(V41), [text]).arguments()
    assert arguments["b"] == value
    assert not is_string or arguments["a"] == value


PLAIN = st.text(alphabet="ab <>\n\"'é漢\\{}[]1:,", max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(alphabet="ab _-é", min_size=1, max_size=8)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=4)), max_size=3)


@given(PLAIN, PLAIN, CALLS, st.sampled_from(DIALECTS), st.booleans())
def test_a_rendered_reply_is_heard_as_it_was(reasoning, content, calls, dialect, in_pieces):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    message["tool_calls"] = [
        {"id": str(place), "function": {"name": name, "arguments": json.dumps(arguments)}}
        for place, (name, arguments) in enumerate(calls)
    ]
    results = [{"role": "tool", "tool_call_id": str(place), "content": ""} for place in range(len(calls))]
    encoding = DeepSeekEncoding(dialect)
    tools = [{"function": {"name": "f"}}]
    prompt = encoding.render([{"role": "user", "content": ""}, message, *results], tools=tools)
    reply = prompt.split("<｜Assistant｜><think>", 2)[1].split("<｜end▁of▁sentence｜>")[0]
    heard = hear(encoding.parser(tools=tools), reply if in_pieces else [reply])
    assert (heard.reasoning, heard.content) == (reasoning, content)
    assert [(name, json.loads(arguments)) for name, arguments in heard.calls] == calls
