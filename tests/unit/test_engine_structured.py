"""Structured outputs in the engine: drafts and target rows are masked alike, and the law holds.

The answers come from the request decoded alone with masks that the grammar library gives for its whole text.
"""

from dataclasses import replace

import pytest
import torch

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.config.structured import StructuredOutput
from dspark.engine.core import Speculation
from dspark.speculative.forced import ForcedAcceptance
from support.alone import allowed_alone, cut, stream_of
from support.engines import finish, given, step, tiny_engine
from support.tiny_models import BLOCK, EOS, MAX_LEN, NUM_VALID

MODELS = {"v41": ("v41", False, torch.float32), "v4 quantised bf16": ("v4", True, torch.bfloat16)}
PROMPT = [8, 30, 30, 12, 61, 7, 44]
COUNT = 24
FORM = StructuredOutput.regex("([A-Z]{2,3}[a-m]|[3-9]{2}_?)+")
BASE = SamplingParams(max_tokens=COUNT, structured=FORM, logprobs=2)
SAMPLINGS = {
    "greedy": BASE,
    "temperature": replace(BASE, temperature=1.0, seed=2),
    "filters": replace(BASE, temperature=0.8, top_k=4, top_p=0.9, min_p=0.01, seed=3),
    "penalties": replace(BASE, temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=1.0),
    "bias": replace(BASE, logit_bias={5: 20.0, 30: -20.0, EOS: -3.0, 70: 50.0}),
    "no end": replace(BASE, temperature=1.0, seed=5, ignore_eos=True),
    "free": replace(BASE, temperature=1.0, seed=6, structured=None),
}
DRAFTS = {
    "own": lambda texts: Speculation(BLOCK),
    "right": given,
    "wrong": lambda texts: given(texts, num_right=0),
    "half right": lambda texts: given(texts, num_right=lambda request_id, anchor: anchor % (BLOCK + 1)),
    "none": lambda texts: Speculation(),
}


@pytest.fixture(params=MODELS.values(), ids=list(MODELS))
def model_key(request):
    return request.param


def start(engine, params, name="a"):
    request = engine.add(name, PROMPT, params, MAX_LEN)
    engine.start(name)
    return request


@pytest.mark.parametrize("drafts", DRAFTS)
def test_speculation_changes_no_token_of_a_structured_output(model_key, drafts):
    """All share every pass, a free output among them. Drafts that the grammar forbids are rejected like any other."""
    texts, outcomes = {}, {}
    for name, params in SAMPLINGS.items():
        stream = stream_of(model_key, PROMPT, params, COUNT)
        texts[name], outcomes[name] = stream.all_ids, cut(stream, params, MAX_LEN)
    engine = tiny_engine(model_key, DRAFTS[drafts](texts), num_slots=len(SAMPLINGS))
    for name, params in SAMPLINGS.items():
        start(engine, params, name)
    finish(engine, SAMPLINGS)
    for name, outcome in outcomes.items():
        request = engine.requests[name]
        assert tuple(request.output_ids) == outcome.token_ids, name
        assert request.finish_reason == outcome.finish_reason, name
        assert request.logprobs == list(outcome.logprobs), name


def test_parameters_make_a_difference():
    """The comparison above would be empty if all requests said the same, or if none of them ended."""
    streams = [stream_of(MODELS["v41"], PROMPT, params, COUNT).token_ids for params in SAMPLINGS.values()]
    assert len(set(map(tuple, streams))) >= len(SAMPLINGS) - 1
    assert any(ids[-1] == EOS for ids in streams)


@pytest.mark.parametrize("sampler", ["keyed", "ratio"])
def test_every_draft_follows_the_form(model_key, sampler):
    """A draft that the target may not draw is a row for nothing: each draft is allowed after the one before it.

    The ratio test is told that nothing else could have been drafted, which is what keeps its distribution.
    """
    params = replace(SAMPLINGS["no end"], sampler=sampler)
    engine = tiny_engine(model_key)
    request, seen = start(engine, params), 0
    while request.finish_reason is None:
        step(engine, ["a"])
        output = list(request.output_ids)
        for k, draft in enumerate(request.draft.token_ids if request.draft else ()):
            allowed = allowed_alone(params, output)[0]
            assert allowed[draft]
            if sampler == "ratio":
                chances = request.draft.probabilities[k]
                assert chances[draft] > 0 and not chances[~allowed].any()
            output.append(draft)
            seen += 1
    assert seen > BLOCK


@pytest.mark.parametrize("drafts", ["own", "half right"])
def test_the_ratio_test_keeps_the_form(model_key, drafts):
    """Its tokens depend on the drafts, and the form does not."""
    params = replace(SAMPLINGS["temperature"], sampler="ratio")
    stream = stream_of(model_key, PROMPT, SAMPLINGS["temperature"], COUNT)
    engine = tiny_engine(model_key, DRAFTS[drafts]({"a": stream.all_ids}))
    request = start(engine, params)
    finish(engine, ["a"])
    for place, token in enumerate(request.output_ids):
        assert allowed_alone(params, request.output_ids[:place])[0, token]
    assert request.finish_reason in ("stop", "length")


def test_a_draft_that_is_not_allowed_is_not_accepted_under_the_ratio_test():
    """Given drafts are certain, so the test would accept whatever the target may draw; here it may not."""
    params = replace(BASE, temperature=1.0, sampler="ratio", structured=StructuredOutput.regex("[A-F]{20}"))
    engine = tiny_engine(MODELS["v41"], given({"a": [*PROMPT, *[60] * 40]}))
    request = start(engine, params)
    finish(engine, ["a"])
    assert sum(request.statistics.accepted) == 0 < sum(request.statistics.verified)
    assert all(17 <= token <= 22 for token in request.output_ids[:-1]) and request.output_ids[-1] == EOS


def test_forced_acceptance_keeps_the_form(model_key):
    """Drafts are taken unseen, and were drawn under the form's masks."""
    engine = tiny_engine(model_key, Speculation(BLOCK, forced=ForcedAcceptance.from_length(4.0, BLOCK)))
    request = start(engine, SAMPLINGS["no end"])
    finish(engine, ["a"])
    for place, token in enumerate(request.output_ids):
        assert allowed_alone(request.params, request.output_ids[:place])[0, token]
    assert request.statistics.num_accepted > BLOCK


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_complete_output_ends(model_key, ignore_eos):
    """Also where the end of sequence is ignored: nothing else is left to say."""
    params = replace(BASE, ignore_eos=ignore_eos, structured=StructuredOutput.regex("[A-Z]{3}"))
    engine = tiny_engine(model_key)
    request = start(engine, params)
    finish(engine, ["a"])
    assert request.finish_reason == "stop"
    assert len(request.output_ids) == 4 and request.output_ids[-1] == EOS


def test_an_output_that_ignores_its_end_goes_on_while_it_can():
    """With a strong wish to end, at every step."""
    eager = replace(BASE, logit_bias={EOS: 1000.0}, structured=StructuredOutput.regex("[A-Z]{1,6}"))
    engine = tiny_engine(MODELS["v41"])
    short, long = start(engine, eager, "short"), start(engine, replace(eager, ignore_eos=True), "long")
    finish(engine, ["short", "long"])
    assert len(short.output_ids) == 2 and len(long.output_ids) == 7
    assert short.finish_reason == long.finish_reason == "stop"


@pytest.mark.parametrize("when", range(1, 6))
def test_replay_finds_its_place_in_the_form(model_key, when):
    """Preempted between any two steps: the matcher is made again from the emitted tokens."""
    params = SAMPLINGS["temperature"]
    expected = cut(stream_of(model_key, PROMPT, params, COUNT), params, MAX_LEN)
    engine = tiny_engine(model_key)
    request = start(engine, params)
    for _ in range(when):
        if request.finish_reason is None:
            step(engine, ["a"])
    if request.finish_reason is None:
        engine.preempt("a")
        assert request.constraint is None
        engine.start("a")
        finish(engine, ["a"])
    assert tuple(request.output_ids) == expected.token_ids


def test_the_output_of_a_fork_is_an_output_of_its_own(model_key):
    """What was said before is its prompt, so its form begins where it begins."""
    engine = tiny_engine(model_key)
    source = start(engine, SAMPLINGS["temperature"])
    for _ in range(3):
        step(engine, ["a"])
    said, params = list(source.token_ids), replace(BASE, temperature=1.0, seed=9)
    fork = engine.fork("a", "fork", params, MAX_LEN)
    finish(engine, ["fork"])
    expected = cut(stream_of(model_key, said, params, COUNT), params, MAX_LEN)
    assert tuple(fork.output_ids) == expected.token_ids


def test_a_form_that_cannot_be_used_is_refused_before_anything_is_held():
    engine = tiny_engine(MODELS["v41"])
    for form, message in [
        (StructuredOutput.regex("a("), "unclosed group"),
        (StructuredOutput.json_object(), "it allows no text"),  # no token of this vocabulary has a quotation mark
    ]:
        with pytest.raises(ConfigError, match=message):
            engine.add("a", PROMPT, replace(BASE, structured=form), MAX_LEN)
        assert not engine.requests


def test_a_matcher_that_gives_up_ends_its_request_and_no_other(model_key, monkeypatch):
    """Limits of a step may be met in the middle of an output; it then ends as an error, not as if it were complete."""
    engine = tiny_engine(model_key)
    broken, well = start(engine, SAMPLINGS["greedy"], "broken"), start(engine, SAMPLINGS["greedy"], "well")
    step(engine, ["broken", "well"])
    monkeypatch.setattr(broken.constraint, "advance", lambda token: False)
    emissions = finish(engine, ["broken", "well"])
    assert broken.finish_reason == emissions["broken"][-1].finish_reason == "error"
    assert (
        tuple(well.output_ids)
        == cut(stream_of(model_key, PROMPT, SAMPLINGS["greedy"], COUNT), SAMPLINGS["greedy"], MAX_LEN).token_ids
    )


def test_padding_ids_are_never_allowed():
    engine = tiny_engine(MODELS["v41"])
    request = start(engine, BASE)
    step(engine, ["a"])
    assert request.constraint.allowed().shape == (NUM_VALID,)
