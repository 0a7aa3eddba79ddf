"""The text of a reply becomes reasoning, content and calls, and nothing that a model writes is lost."""

import json

import pytest

from dspark.engine import embedded_folder
from dspark.serve.encoding import ReplyDelta, ToolCallDelta, chat_encoding
from dspark.serve.encoding.deepseek import DeepSeekEncoding
from dspark.serve.encoding.dialects import V4, V41
from support.replies import block_text, call_text, hear, parser_of

BOTH = pytest.mark.parametrize("dialect", [V4, V41], ids=["tags joined", "tags spaced"])
TOOL = {"type": "function", "function": {"name": "add"}}


@BOTH
def test_thoughts_answer_and_calls_are_told_apart(dialect):
    call = call_text(dialect, "look_up", ("word", "true", 'say "tau"\n'), ("limit", "false", "2"))
    text = "Look it up.</think>Let me see." + block_text(dialect, call, call_text(dialect, "add"))
    heard = hear(parser_of(dialect, thinks=True), [text])
    assert (heard.reasoning, heard.content) == ("Look it up.", "Let me see.")
    assert heard.calls == [("look_up", '{"word": "say \\"tau\\"\\n", "limit": 2}'), ("add", "{}")]


@BOTH
def test_a_string_argument_streams_while_it_is_written(dialect):
    parser = parser_of(dialect)
    opening = block_text(dialect, call_text(dialect, "say", ("text", "true", "@"))).split("@")[0]
    assert parser.push(opening)[-1].tool_call == ToolCallDelta(0, "call-0", "say", '{"text": "')
    assert parser.push('one "') == [ReplyDelta(tool_call=ToolCallDelta(0, None, None, 'one \\"'))]
    assert parser.push("two") == [ReplyDelta(tool_call=ToolCallDelta(0, None, None, "two"))]


def test_content_is_held_back_only_while_it_may_begin_a_block():
    parser = parser_of(V41)
    assert parser.push("one\n\n") == [ReplyDelta(content="one")]
    assert parser.push("two <") == [ReplyDelta(content="\n\ntwo ")]
    assert parser.push("b>") == [ReplyDelta(content="<b>")]
    assert parser.push("\n") == []
    assert parser.finish() == [ReplyDelta(content="\n")]


def test_without_tools_markup_is_text():
    text = "ok" + block_text(V41, call_text(V41, "add"))
    assert hear(parser_of(V41, takes_calls=False), [text]).content == text


def test_a_reply_that_never_stops_thinking_is_all_thoughts():
    assert hear(parser_of(V41, thinks=True), ["so <", "/thin", "k so"]).reasoning == "so </think so"


def test_calls_may_come_straight_out_of_thoughts():
    heard = hear(parser_of(V41, thinks=True), ["hm" + block_text(V41, call_text(V41, "add")) + "so</think>done"])
    assert (heard.reasoning, heard.content, heard.calls) == ("hmso", "done", [("add", "{}")])


def test_a_forced_call_begins_inside_the_block():
    encoding = DeepSeekEncoding(V41)
    parser = encoding.parser(tools=[TOOL], tool_choice="required", thinking=False)
    assert hear(parser, [call_text(V41, "add"), f"</{V41.block}>"]).calls == [("add", "{}")]


def test_a_forced_call_that_is_none_is_content():
    parser = DeepSeekEncoding(V41).parser(tools=[TOOL], tool_choice="required", thinking=False)
    assert hear(parser, ["I cannot", " do that."]).content == "I cannot do that."


@pytest.mark.parametrize(
    "text",
    [
        "a ｜DSML｜ b",
        "a <｜DSML｜ cal",
        "a\n\n<｜DSML｜ calls>",
        "a\n\n<｜DSML｜ calls>\nb\n</｜DSML｜ calls>\n",
        "a\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke>x",
        'a\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f\n">',
        'a\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f',
        "a\n\n<｜DSML｜tool_calls>\n",
    ],
)
def test_a_block_without_a_call_is_content(text):
    heard = hear(parser_of(V41), [text])
    assert (heard.content, heard.calls) == (text, [])


def test_text_between_the_tags_is_content():
    call = call_text(V41, "add", ("a", "false", "1"))
    text = block_text(V41, "", call.replace(">\n<", ">x<", 1), "and \n", call) + "\nend"
    heard = hear(parser_of(V41), [text])
    assert (heard.content, heard.calls) == ("x\nand\nend", [("add", '{"a": 1}')] * 2)


@pytest.mark.parametrize("value", ["{oops", "hello", "", "NaN", "1 2", "9" * 5000])
def test_a_value_that_is_not_the_json_it_claims_to_be_becomes_a_string(value):
    heard = hear(parser_of(V41), [block_text(V41, call_text(V41, "f", ("a", "false", value), ("b", "true", "x")))])
    assert heard.arguments() == {"a": value, "b": "x"}


def test_an_argument_that_does_not_say_its_kind_is_read_as_what_it_is():
    call = call_text(V41, "f", ("a", "true", "hi"), ("b", "true", "[1]")).replace(' string="true"', "")
    assert hear(parser_of(V41), [block_text(V41, call)]).arguments() == {"a": "hi", "b": [1]}


@pytest.mark.parametrize("name", ["shipping address", " string= mode ", "", "é漢"])
def test_an_argument_may_have_any_name(name):
    assert hear(parser_of(V41), [block_text(V41, call_text(V41, "f", (name, "true", "x")))]).arguments() == {name: "x"}


def test_tags_inside_a_string_are_text():
    value = f"<{V41.block}> </{V41.invoke}> <{V41.parameter}>"
    assert hear(parser_of(V41), [block_text(V41, call_text(V41, "f", ("a", "true", value)))]).arguments() == {
        "a": value
    }


def test_closing_tags_that_are_left_out_end_the_call():
    call = call_text(V41, "f", ("a", "true", "x"))
    text = block_text(V41, call, call).replace(f"</{V41.invoke}>\n", "")
    heard = hear(parser_of(V41), [text + "after"])
    assert (heard.content, heard.calls) == ("after", [("f", '{"a": "x"}')] * 2)


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [("xy</｜DSML", '{"a": "xy</｜DSML'), ("xy</｜DSML｜ parameter>\n</｜DS", '{"a": "xy"'), ("xy", '{"a": "xy')],
)
def test_a_call_that_is_cut_off_stays_unfinished(cut, arguments):
    opening = block_text(V41, call_text(V41, "f", ("a", "true", "@"))).split("@")[0]
    heard = hear(parser_of(V41), ["ok" + opening + cut])
    assert (heard.content, heard.calls) == ("ok", [("f", arguments)])


@pytest.mark.parametrize("dialect", [V4, V41], ids=["tags joined", "tags spaced"])
def test_a_reply_comes_back_as_the_message_that_was_rendered(dialect):
    arguments = {"a": 'x\n"</think>', "b": [1, {"c": None}], "d": "", "e": 2.5, "f": "\n\n"}
    message = {
        "role": "assistant",
        "content": "See.\n",
        "reasoning_content": "\nHm.\n",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": json.dumps(arguments)}}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": ""}
    encoding = DeepSeekEncoding(dialect)
    prompt = encoding.render([message, result], tools=[TOOL])
    reply = prompt.split("<think>")[-2].split("<｜end▁of▁sentence｜>")[0]
    heard = hear(encoding.parser(tools=[TOOL]), [reply])
    assert (heard.reasoning, heard.content, heard.arguments()) == ("\nHm.\n", "See.\n", arguments)


def test_ids_of_calls_differ_between_replies():
    text = block_text(V41, call_text(V41, "f"))
    encoding = DeepSeekEncoding(V41)
    ids = {encoding.parser(tools=[TOOL]).push(text)[0].tool_call.id for _ in range(50)}
    assert len(ids) == 50


def test_a_template_models_reply_is_its_text():
    parser = chat_encoding(embedded_folder()).parser()
    assert hear(parser, ["<think>", "", "a\n\n<｜DSML｜ calls>"]).content == "<think>a\n\n<｜DSML｜ calls>"
