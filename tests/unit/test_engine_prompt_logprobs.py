"""Log-probabilities of prompt tokens: the bits of one row at a time, in any chunks, each collected once."""

from dataclasses import replace

import pytest
import torch

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.scheduler.plan import PlannedSpan, StepPlan
from support.alone import cut, stream_of
from support.engines import finish, step, tiny_engine
from support.tiny_models import MAX_LEN

MODELS = {"v41": ("v41", False, torch.float32), "v4 quantised bf16": ("v4", True, torch.bfloat16)}
PROMPT = [8, 30, 30, 12, 61, 7, 44, 19, 20, 3, 55]
COUNT = 9
PARAMS = SamplingParams(max_tokens=COUNT, prompt_logprobs=3, logprobs=1, ignore_eos=True)


@pytest.fixture(params=MODELS.values(), ids=list(MODELS))
def model_key(request):
    return request.param


@pytest.fixture
def expected(model_key):
    return cut(stream_of(model_key, PROMPT, PARAMS, COUNT), PARAMS, MAX_LEN)


def chunk(engine, num_known, *others):
    """One step over the next rows of "a", and all of other requests."""
    spans = [PlannedSpan("a", num_known)]
    spans += [PlannedSpan(name, engine.needs(name).num_pending, engine.needs(name).verify_len) for name in others]
    return engine.step(StepPlan(tuple(spans)))


def start(engine, params=PARAMS, name="a", prompt=PROMPT):
    request = engine.add(name, prompt, params, MAX_LEN)
    engine.start(name)
    return request


def check(request, emissions, expected):
    assert emissions[0].prompt_logprobs == expected.prompt_logprobs
    assert all(emission.prompt_logprobs is None for emission in emissions[1:])
    assert tuple(request.output_ids) == expected.token_ids
    assert tuple(request.logprobs) == expected.logprobs


@pytest.mark.parametrize("chunks", [(11,), (1,) * 11, (10, 1), (1, 10), (4, 3, 4), (5, 5, 1)])
def test_any_chunks_give_the_same(model_key, expected, chunks):
    """Beside a request that verifies drafts in the same passes."""
    engine = tiny_engine(model_key)
    start(engine, replace(PARAMS, prompt_logprobs=None, max_tokens=40), "other")
    step(engine, ["other"])
    request, emissions = start(engine), []
    for size in chunks:
        emissions += [emission for emission in chunk(engine, size, "other") if emission.request_id == "a"]
    check(request, emissions + finish(engine, ["a"])["a"], expected)
    assert [found.token_id for found in request.prompt_logprobs[1:]] == PROMPT[1:]


@pytest.mark.parametrize("when", range(1, 11))
def test_rows_that_are_computed_again_are_not_counted_again(model_key, expected, when):
    """Preempted in the middle of prefill, replayed in other chunks, and again after the first tokens."""
    engine = tiny_engine(model_key)
    request = start(engine)
    chunk(engine, when)
    assert len(request.prompt_logprobs) == 1 + when
    for rows in (1, when):
        engine.preempt("a")
        engine.start("a")
        chunk(engine, rows)
        assert len(request.prompt_logprobs) == 1 + when
    emissions = step(engine, ["a"]) + step(engine, ["a"])
    engine.preempt("a")
    engine.start("a")
    check(request, emissions + finish(engine, ["a"])["a"], expected)


def test_a_pass_that_fails_collects_nothing(model_key, expected, monkeypatch):
    engine = tiny_engine(model_key)
    request = start(engine)
    chunk(engine, 4)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.target, "logits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chunk(engine, 4)
    engine.preempt("a")
    engine.start("a")
    check(request, finish(engine, ["a"])["a"], expected)


def test_a_prompt_of_one_token_has_none(model_key):
    engine = tiny_engine(model_key)
    start(engine, prompt=PROMPT[:1])
    [first, *_] = finish(engine, ["a"])["a"]
    assert first.prompt_logprobs == (None,)


def test_nobody_pays_who_does_not_ask(model_key):
    """Rows of a prompt have no logits then."""
    engine = tiny_engine(model_key)
    request = start(engine, replace(PARAMS, prompt_logprobs=None))
    assert engine._span_tokens(PlannedSpan("a", len(PROMPT))).num_logits == 1
    [first, *_] = finish(engine, ["a"])["a"]
    assert first.prompt_logprobs is None and request.prompt_logprobs is None


def test_a_fork_has_no_rows_of_its_prompt():
    engine = tiny_engine(MODELS["v41"])
    start(engine)
    step(engine, ["a"])
    with pytest.raises(ConfigError, match="a fork has none: ask for them on the request that it continues"):
        engine.fork("a", "b", PARAMS, MAX_LEN)
    assert list(engine.requests) == ["a"]
