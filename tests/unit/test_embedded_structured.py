"""Structured outputs of the embedded model: they parse, they match, and drafts change no token of them."""

import json
import re
from dataclasses import replace

import pytest

from dspark import LLM, SamplingParams
from dspark.config import ConfigError, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
        "left": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "A record about a person: "
SAMPLINGS = [
    SamplingParams(max_tokens=200),
    SamplingParams(max_tokens=200, temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(max_tokens=200, temperature=1.0, seed=2),
    SamplingParams(max_tokens=200, temperature=1.0, seed=3, repetition_penalty=1.1, frequency_penalty=0.1),
    SamplingParams(max_tokens=200, temperature=1.0, seed=4, sampler="ratio"),
]


def is_record(text):
    """Whether a text is JSON that the schema describes."""
    record = json.loads(text)
    assert set(record) in ({"name", "age", "tags"}, set(SCHEMA["properties"]))
    assert isinstance(record["name"], str) and len(record["name"]) <= 10
    assert type(record["age"]) is int and 0 <= record["age"] <= 120
    assert len(record["tags"]) <= 2 and set(record["tags"]) <= {"red", "green", "blue"}
    assert record.get("left") in (None, True, False)
    return True


CHOICES = ("yes", "no", 'it is "not"\nclear', "vielleicht \N{SNOWMAN}")
FORMS = {
    "json_schema": (StructuredOutput.json_schema(SCHEMA), is_record),
    "regex": (
        StructuredOutput.regex(r"\d{3}-\d{4}( \(home\))?"),
        lambda text: re.fullmatch(r"\d{3}-\d{4}( \(home\))?", text),
    ),
    "choice": (StructuredOutput.choice(CHOICES), CHOICES.__contains__),
    "grammar": (
        StructuredOutput.grammar('start: NUM ("+" NUM){1,3}\nNUM: /[0-9]{1,3}/'),
        lambda text: re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text),
    ),
}


@pytest.fixture(scope="module")
def drafted():
    return LLM(draft="dspark")


@pytest.fixture(scope="module")
def plain():
    return LLM(draft="off")


@pytest.mark.parametrize("kind", FORMS)
def test_outputs_match_and_drafts_change_no_token(drafted, plain, kind):
    form, matches = FORMS[kind]
    params = [replace(sampling, structured=form) for sampling in SAMPLINGS]
    with_drafts = drafted.generate([PROMPT] * len(params), params)
    without = plain.generate([PROMPT] * len(params), params)
    for own, other, sampling in zip(with_drafts, without, params, strict=True):
        assert own.finish_reason == other.finish_reason == "stop"
        assert matches(own.text) and matches(other.text)
        assert sampling.sampler == "ratio" or own.token_ids == other.token_ids
    assert sum(one.statistics.num_accepted for one in with_drafts) > 0


def test_any_object_is_json_where_it_ends(drafted):
    params = [SamplingParams(max_tokens=48, temperature=0.8, seed=seed) for seed in range(4)]
    params = [replace(one, structured=StructuredOutput.json_object()) for one in params]
    completions = drafted.generate(["The settings as JSON: "] * len(params), params)
    for one in completions:
        assert one.text.lstrip().startswith("{")
        assert one.finish_reason == "length" or isinstance(json.loads(one.text), dict)


def test_a_form_that_cannot_be_used_takes_its_companions_out_again(drafted, plain):
    wrong = SamplingParams(structured=StructuredOutput.json_schema({"type": "array", "uniqueItems": True}))
    with pytest.raises(ConfigError, match=r'cannot be used: Unimplemented keys: \["uniqueItems"\]'):
        drafted.generate([PROMPT, PROMPT], [SamplingParams(max_tokens=2), wrong])
    short = SamplingParams(max_tokens=2)
    assert drafted.generate(PROMPT, short)[0].token_ids == plain.generate(PROMPT, short)[0].token_ids


def test_prompt_log_probabilities_are_those_of_scoring_the_text(drafted, plain):
    """With and without drafts, and whatever the number of alternatives."""
    params = SamplingParams(max_tokens=3, prompt_logprobs=2)
    [own], [other] = drafted.generate(PROMPT, params), plain.generate(PROMPT, replace(params, prompt_logprobs=0))
    assert own.prompt_logprobs[0] is None and len(own.prompt_logprobs) == own.prompt_len
    values = [[one.token for one in completion.prompt_logprobs[1:]] for completion in (own, other)]
    assert values[0] == values[1]
    assert all(one.rank > 2 or (one.token_id, one.token) in one.top for one in own.prompt_logprobs[1:])
