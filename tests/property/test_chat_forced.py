"""A forced call is one: whatever the form of such a reply allows is read as calls, and nothing else.

Both ways: what the parser reads as calls of the offered functions is allowed, and any walk through what is allowed is
read as such calls, up to its end. Not promised: that arguments fit a schema beyond the names of its properties.
"""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dspark.config import StructuredOutput
from dspark.engine import embedded_folder
from dspark.engine.grammar import GrammarCompiler
from dspark.engine.tokenizer import TextTokenizer
from dspark.serve.encoding.deepseek import DeepSeekEncoding
from dspark.serve.encoding.dialects import MARK, V4, V4_PREVIEW, V41
from dspark.serve.encoding.forced import call_grammar
from support.replies import call_text, hear, parser_of

EOS = 1
TOKENIZER = TextTokenizer(embedded_folder())
PLAIN = Tokenizer.from_file(str(embedded_folder() / "tokenizer.json"))
COMPILER = GrammarCompiler(TOKENIZER, [EOS], TOKENIZER.vocab_size)
DIALECTS = pytest.mark.parametrize("dialect", [V4, V41], ids=["tags joined", "tags spaced"])
TOOLS = [
    {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {}, "wörd | 2": {}}}},
    {"name": "any", "parameters": {}},
    {"name": "none", "parameters": {"type": "object", "properties": {}}},
]
PARAMETERS = {"look_up": ["word", "wörd | 2"], "any": ["x", "word", "ö [*"], "none": []}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
# Strings inside of JSON may not hold the character of the tags; texts may hold anything but the tag that ends them.
VALUES = JSON.map(lambda value: ("false", json.dumps(value, ensure_ascii=False).replace(MARK[0], "|"))) | st.text().map(
    lambda text: ("true", text)
)
CALLS = st.lists(
    st.sampled_from(sorted(PARAMETERS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(st.tuples(st.sampled_from(PARAMETERS[name]), VALUES), max_size=3)
            if PARAMETERS[name]
            else st.just([]),
        )
    ),
    min_size=1,
    max_size=3,
)


def start(dialect, tools=TOOLS):
    return COMPILER.start(StructuredOutput.grammar(call_grammar(dialect, tools)))


def is_allowed(matcher, text):
    ids = PLAIN.encode(text, add_special_tokens=False).ids
    return all(matcher.advance(token) for token in ids) and bool(matcher.allowed()[EOS])


def read(dialect, text):
    return hear(parser_of(dialect, starts_in_calls=True), [text])


@DIALECTS
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(calls=CALLS)
def test_calls_that_are_read_are_allowed(dialect, calls):
    text = "".join(
        call_text(dialect, name, *[(key, kind, value) for key, (kind, value) in arguments]) for name, arguments in calls
    )
    text += f"</{dialect.block}>"
    heard = read(dialect, text)
    assert [name for name, _ in heard.calls] == [name for name, _ in calls]
    assert is_allowed(start(dialect), text)


@DIALECTS
@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "{end}",
        '<{invoke} name="other">\n</{invoke}>\n{end}',
        '<{invoke} name="none">\n<{parameter} name="x" string="true">1</{parameter}>\n</{invoke}>\n{end}',
        '<{invoke} name="look_up">\n<{parameter} name="x" string="true">1</{parameter}>\n</{invoke}>\n{end}',
        '<{invoke} name="any">\n<{parameter} name="x" string="false">oops</{parameter}>\n</{invoke}>\n{end}',
        '<{invoke} name="any">\n<{parameter} name="x" string="false">"</{parameter}>"</{parameter}>\n</{invoke}>{end}',
        '<{invoke} name="any">\n<{parameter} name="x" string="true">1</{parameter}>\n',
        '<{invoke} name="any">\n</{invoke}>\n',
        '<{invoke} name="any">\n</{invoke}>\n{end} and more',
    ],
)
def test_anything_else_is_not(dialect, text):
    names = {"invoke": dialect.invoke, "parameter": dialect.parameter, "end": f"</{dialect.block}>"}
    for name, spelt in names.items():
        text = text.replace("{" + name + "}", spelt)
    assert not is_allowed(start(dialect), text)


@DIALECTS
@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_allowed_is_read_as_calls(dialect, seed):
    """Walks that now and then head for the next tag, or they would never end a value."""
    rng = random.Random(seed)
    matcher, ids, heading = start(dialect), [], []
    opening = [f'<{dialect.parameter} name="{name}" string="' for name in ("word", "wörd | 2", "x")]
    tags = [
        *opening,
        f"</{dialect.parameter}>\n",
        f"</{dialect.invoke}>\n",
        f"<{dialect.invoke} name=",
        '"',
        "}",
        "]",
        '{"',
    ]
    for _ in range(4_000):
        allowed = matcher.allowed()
        if allowed[EOS]:
            break
        if not heading and rng.random() < 0.4:
            heading = PLAIN.encode(rng.choice(tags), add_special_tokens=False).ids
        token = heading.pop(0) if heading else -1
        if token < 0 or not allowed[token]:
            heading = []
            token = rng.choice(allowed.nonzero().flatten().tolist())
        ids.append(token)
        assert matcher.advance(token)
    else:
        raise AssertionError("the walk does not end")
    text = TOKENIZER.decode(ids)
    heard = read(dialect, text)
    assert heard.calls
    assert heard.content == ""
    for number, (name, _) in enumerate(heard.calls):
        arguments = heard.arguments(number)
        assert name == "any" or set(arguments) <= set(PARAMETERS[name])


def test_only_the_named_function_may_be_called():
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    encoding = DeepSeekEncoding(V4_PREVIEW)
    assert encoding.reply_grammar(tools=tools) is None
    assert encoding.reply_grammar(tools=tools, tool_choice="none") is None
    named = encoding.reply_grammar(tools=tools, tool_choice={"type": "function", "function": {"name": "any"}})
    matcher = COMPILER.start(StructuredOutput.grammar(named))
    assert is_allowed(matcher, f"{call_text(V4, 'any')}</{V4.block}>")
    assert not is_allowed(COMPILER.start(StructuredOutput.grammar(named)), f"{call_text(V4, 'none')}</{V4.block}>")


def test_many_functions_with_many_parameters_fit():
    """More than a grammar may hold: the names of parameters are free then, those of functions are not."""
    properties = {f"parameter_{number}": {} for number in range(60)}
    tools = [{"name": f"function_{number}", "parameters": {"properties": properties}} for number in range(100)]
    call = call_text(V41, "function_99", ("x", "false", "1"))
    assert is_allowed(start(V41, tools), f"{call}</{V41.block}>")
    assert not is_allowed(start(V41, tools), f"{call_text(V41, 'function_100')}</{V41.block}>")


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({}, True),
        ({"type": "object"}, True),
        ({"additionalProperties": False}, False),
        ({"properties": {"a": {}}}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, True),
        ({"properties": {'quoted"': {}}}, True),
    ],
)
def test_a_schema_that_names_its_properties_names_the_parameters(schema, is_open):
    text = f"{call_text(V41, 'f', ('b', 'true', '1'))}</{V41.block}>"
    assert is_allowed(start(V41, [{"name": "f", "parameters": schema}]), text) is is_open
