"""Forms compiled over the embedded model's vocabulary: what is allowed, what is refused, and in which time.

What may come next depends on the tokens so far only, whatever was looked up on the way. Not tested here: that the
library's masks are right for every grammar.
"""

import json
import random
import time

import pytest
import torch
from tokenizers import Tokenizer

from dspark.config import ConfigError, StructuredOutput
from dspark.engine import embedded_folder, grammar
from dspark.engine.grammar import GrammarCompiler
from dspark.engine.tokenizer import TextTokenizer

EOS = 1
TOKENIZER = TextTokenizer(embedded_folder())
PLAIN = Tokenizer.from_file(str(embedded_folder() / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["red", "green"]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json_schema": StructuredOutput.json_schema(SCHEMA),
    "json_object": StructuredOutput.json_object(),
    "regex": StructuredOutput.regex(r"(foo|foobar)+baz|\d{3}-\d{4}|[a-z ]{1,9}\."),
    "choice": StructuredOutput.choice(["yes", "no", 'may"be\n', "vielleicht \N{SNOWMAN}"]),
    "grammar": StructuredOutput.grammar('start: NUM ("+" NUM)*\nNUM: /[0-9]{1,3}/'),
}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, [EOS], TOKENIZER.vocab_size)


def ids_of(text):
    return PLAIN.encode(text, add_special_tokens=False).ids


def accepts(matcher, text):
    """Whether a whole text is an output."""
    for token in ids_of(text):
        if not matcher.allowed()[token]:
            return False
        assert matcher.advance(token)
    return bool(matcher.allowed()[EOS])


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("json_schema", ['{"name": "x", "age": 3}', '{"name":"","age":-3,"tags":"red"}'], ['{"age": 3}', "[]"]),
        ("json_object", ["{}", '{"a": [1, {"b": null}]}'], ["[]", '{"a": }']),
        ("regex", ["foofoobarbaz", "123-4567", "so it is."], ["foo", "12-4567"]),
        ("choice", ["yes", 'may"be\n', "vielleicht \N{SNOWMAN}"], ["y", "yesno"]),
        ("grammar", ["1+22+333", "7"], ["1+", "4444"]),
    ],
)
def test_what_each_form_accepts(compiler, kind, good, bad):
    for text in good:
        assert accepts(compiler.start(FORMS[kind]), text), text
    for text in bad:
        assert not accepts(compiler.start(FORMS[kind]), text), text


@pytest.mark.parametrize("kind", FORMS)
def test_what_may_come_next_does_not_depend_on_what_was_looked_up(compiler, kind):
    """A matcher that looked ahead at every token, also where it may not, and one made for the occasion."""
    rng = random.Random(kind)
    for _ in range(4):
        live, taken = compiler.start(FORMS[kind]), []
        for _ in range(20):
            allowed = live.allowed()
            compiler._compiled.clear()
            fresh = compiler.start(FORMS[kind])
            assert all(fresh.advance(token) for token in taken)
            assert torch.equal(fresh.allowed(), allowed)
            for _ in range(rng.randint(0, 2)):
                ahead = []
                for _ in range(rng.randint(1, 6)):
                    ahead.append(rng.choice(live.allowed(ahead).nonzero()[:, 0].tolist()))
                astray = fresh.copy()
                assert all(astray.advance(token) for token in ahead)
                assert torch.equal(live.allowed(ahead), astray.allowed())
                assert live.allowed([*ahead[:-1], TOKENIZER.vocab_size - 1 - EOS, 7]) is None
                assert torch.equal(live.allowed(ahead[:1]), fresh.allowed(ahead[:1]))
            assert torch.equal(live.allowed(), allowed)
            taken.append(rng.choice(allowed.nonzero()[:, 0].tolist()))
            assert live.advance(taken[-1])
            if taken[-1] == EOS:
                break


MANY_STATES = StructuredOutput.regex(
    r"(foo[a-z]{3,9}|b(ar|az)+[0-9]{1,5}|\w+@\w+\.(com|org)|[A-Z]{2,30}x[a-z]{4,40}y){1,9}"
)


def test_no_output_ends_because_of_what_others_said(compiler, monkeypatch):
    """Outputs of one form share what the library remembers of it. Used up, they go on with the same masks."""
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 140)
    tight, rng = GrammarCompiler(TOKENIZER, [EOS], TOKENIZER.vocab_size), random.Random(0)
    compiled, whole = [], tight._compile
    monkeypatch.setattr(tight, "_compile", lambda form: compiled.append(form) or whole(form))
    for _ in range(80):
        matcher, wide = tight.start(MANY_STATES), compiler.start(MANY_STATES)
        for _ in range(16):
            assert torch.equal(matcher.allowed(), wide.allowed())
            token = rng.choice(matcher.allowed().nonzero()[:, 0].tolist())
            ahead = matcher.allowed([token])
            assert torch.equal(ahead, wide.allowed([token]))
            assert matcher.advance(token) and wide.advance(token)
            if token == EOS:
                break
    assert 3 < len(compiled) < 40


def test_a_form_that_is_too_complex_for_one_output_ends_it_as_broken(monkeypatch):
    """Alone, too: the limit is met in the middle of the output. It can only end then, and ending is not allowed."""
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 110)
    tight, rng = GrammarCompiler(TOKENIZER, [EOS], TOKENIZER.vocab_size), random.Random(1)
    endings = set()
    for _ in range(30):
        matcher, taken = tight.start(MANY_STATES), []
        while len(taken) < 40 and (not taken or taken[-1] != EOS):
            taken.append(rng.choice(matcher.allowed().nonzero()[:, 0].tolist()))
            is_allowed = matcher.advance(taken[-1])
            assert is_allowed or taken[-1] == EOS
        endings.add(is_allowed)
        if not is_allowed:
            assert matcher.allowed().nonzero()[:, 0].tolist() == [EOS] and matcher.allowed([EOS]) is None
    assert False in endings


def test_a_complete_output_only_ends(compiler):
    matcher = compiler.start(FORMS["choice"])
    for token in ids_of("yes"):
        assert matcher.advance(token)
    assert matcher.allowed().nonzero()[:, 0].tolist() == [EOS]
    assert matcher.advance(EOS)
    assert matcher.allowed().any(), "a row is never without a token"


def test_an_output_that_avoids_its_end_ends_where_it_is_complete(compiler):
    """A number may end after one digit, and must after three."""
    form = StructuredOutput.regex("[0-9]{1,3}")
    matcher, ending = compiler.start(form, avoids_eos=True), compiler.start(form)
    for token in ids_of("1"):
        assert matcher.advance(token) and ending.advance(token)
    assert ending.allowed()[EOS] and not matcher.allowed()[EOS]
    for token in ids_of("2") + ids_of("3"):
        assert matcher.advance(token)
    assert matcher.allowed().nonzero()[:, 0].tolist() == [EOS]


def test_special_tokens_are_never_text(compiler):
    """Not even where any text is allowed: their spelling is not their id."""
    allowed = compiler.start(StructuredOutput.regex("(.|\n)*")).allowed()
    assert [token for token in sorted(TOKENIZER.special_ids) if allowed[token]] == [EOS]


def test_a_refused_token_is_told(compiler):
    assert not compiler.start(FORMS["regex"]).advance(ids_of("!")[0])


def nested(depth):
    return '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth


ENDLESS = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(12)}
WIDE = [{"type": "object", "properties": {f"p{i}_{j}": {"type": "string"} for j in range(12)}} for i in range(100)]
HOSTILE = {
    "repeated repetition": StructuredOutput.regex("(a{1000}){1000}"),
    "three repetitions": StructuredOutput.regex("((a{1000}){1000}){1000}"),
    "open repetitions": StructuredOutput.regex("(.*a){30}"),
    "look back far": StructuredOutput.regex("(a|b)*a(a|b){200}"),
    "long": StructuredOutput.regex("[a-z]{1,9}" * 6000),
    "deep regex": StructuredOutput.regex("(" * 30_000 + "a" + ")" * 30_000),
    "deep schema": StructuredOutput("json_schema", nested(100)),
    "deeper schema": StructuredOutput("json_schema", nested(200)),
    "exponential references": StructuredOutput.json_schema(
        {"$defs": {**ENDLESS, "d12": {"type": "string"}}, "$ref": "#/$defs/d0"}
    ),
    "wide schema": StructuredOutput.json_schema({"anyOf": WIDE}),
    "many items": StructuredOutput.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 10**6}),
    "long string": StructuredOutput.json_schema({"type": "string", "minLength": 10**9}),
    "deep grammar": StructuredOutput.grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "deep schema in a grammar": StructuredOutput.grammar("start: %json " + nested(600)),
    "ambiguous": StructuredOutput.grammar('start: s\ns: s s | "a" | '),
    "repeated rule": StructuredOutput.grammar('start: a{1000000}\na: b{1000}\nb: "x" | "y"'),
    "many choices": StructuredOutput.choice([f"choice {i}" for i in range(4000)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_form_keeps_the_engine_busy(compiler, name):
    """Each is refused, or gives an output a token at a time; in seconds on a loaded machine, not minutes."""
    began, refusal = time.perf_counter(), ""
    try:
        matcher = compiler.start(HOSTILE[name])
        for _ in range(12):
            if not matcher.advance(int(matcher.allowed().to(torch.uint8).argmax())):
                break
    except ConfigError as error:
        refusal = str(error)
    assert time.perf_counter() - began < 10.0
    assert len(refusal) < 500
    assert not refusal or refusal.startswith(f"the {HOSTILE[name].kind} of structured output cannot be used: ")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutput.regex("(?=a)b"), "look-around"),
        (StructuredOutput.regex("a("), "unclosed group"),
        (StructuredOutput.regex(r"[^\s\S]"), "it allows no text"),
        (StructuredOutput.json_schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (StructuredOutput.json_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (StructuredOutput.json_schema({"$ref": "file:///etc/hostname"}), "does not fetch resources"),
        (StructuredOutput.json_schema({"$ref": "http://127.0.0.1:9/x"}), "does not fetch resources"),
        (StructuredOutput.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "Unsatisfiable schema"),
        (StructuredOutput.grammar("start: other"), 'unknown name: "other"'),
        (StructuredOutput.grammar("start: start"), "it allows no text"),
    ],
)
def test_forms_that_are_refused(compiler, form, message):
    """In the library's own words, which name the feature or the place."""
    with pytest.raises(ConfigError, match=f"the {form.kind} of structured output cannot be used: ") as caught:
        compiler.start(form)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_form_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch):
    compiler, compiled = GrammarCompiler(TOKENIZER, [EOS], TOKENIZER.vocab_size), []
    whole = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda form: compiled.append(form) or whole(form))
    forms = [StructuredOutput.regex(f"a{{{count}}}") for count in range(1, grammar._MAX_COMPILED + 2)]
    for form in [*forms[:-1], *forms[:-1], forms[-1], forms[-1], forms[1], forms[0]]:
        compiler.start(form)
    assert compiled == [*forms, forms[0]]


def test_a_model_without_an_end_has_no_structured_output():
    with pytest.raises(ConfigError, match="needs an end-of-sequence id and this model names none"):
        GrammarCompiler(TOKENIZER, [], TOKENIZER.vocab_size).start(FORMS["regex"])


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package llguidance: pip install 'dspark\[structured\]'"):
        GrammarCompiler(TOKENIZER, [EOS], TOKENIZER.vocab_size).start(FORMS["regex"])


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("xml", "", "kind of structured output must be one of json_schema, json_object"),
        ("regex", "", "the kind 'regex' needs a non-empty text"),
        ("regex", ("a",), "the kind 'regex' needs a non-empty text"),
        ("json_schema", "{", "json_schema of structured output is not JSON"),
        ("json_schema", "[]", r"json_schema of structured output must be an object, not \[\]"),
        ("json_schema", "[" * 50_000, "nested too deeply"),
        ("json_schema", "true", "json_schema of structured output must be an object, not True"),
        ("json_object", "{}", "takes no text"),
        ("choice", "yes", "needs a tuple of texts, not 'yes'"),
        ("choice", (), r"needs a tuple of texts, not \(\)"),
        ("choice", ("a", ""), "must be non-empty texts, not ''"),
        ("regex", "a" * 70_000, "has 70000 characters and 65536 are admitted"),
        ("choice", ("a" * 40_000, "b" * 40_000), "has 80000 characters"),
    ],
)
def test_texts_that_are_no_form(kind, text, message):
    with pytest.raises(ConfigError, match=message):
        StructuredOutput(kind, text)


def test_forms_are_equal_by_what_they_say():
    assert StructuredOutput.choice(["a", "b", "a"]) == StructuredOutput("choice", ("a", "b"))
    assert StructuredOutput.json_schema(SCHEMA) == StructuredOutput("json_schema", json.dumps(SCHEMA))
    assert len({StructuredOutput.json_object(), StructuredOutput("json_object")}) == 1
