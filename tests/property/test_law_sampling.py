"""Whatever the sampling parameters, a request's tokens and log-probabilities are the same with and without speculation.

Alone or beside others, with the model's own drafts, with drafts that are all right, and with drafts that are all wrong.
The ratio test keeps the distribution instead of the tokens; that is tested where it lives.
"""

from dataclasses import replace

import pytest
import torch

from dspark.config.sampling import SamplingParams
from dspark.engine.core import Speculation
from support.alone import cut, stream_of
from support.engines import finish, given, tiny_engine
from support.tiny_models import BLOCK, EOS, MAX_LEN

MODELS = {"v41": ("v41", False, torch.float32), "v4 quantised bf16": ("v4", True, torch.bfloat16)}
PROMPT = [8, 30, 30, 12, 61, 7, 44]
COUNT = 13
SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6, seed=1),
    "temperature 1": SamplingParams(temperature=1.0, seed=2),
    "top-k": SamplingParams(temperature=1.0, top_k=3, seed=3),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7, seed=4),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2, seed=5),
    "all filters": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=6),
    "repetition penalty": SamplingParams(temperature=1.0, repetition_penalty=2.0, seed=7),
    "presence penalty": SamplingParams(presence_penalty=2.0),
    "frequency penalty": SamplingParams(temperature=1.0, frequency_penalty=2.0, seed=8),
    "negative penalties": SamplingParams(temperature=1.0, frequency_penalty=-1.0, presence_penalty=-1.0, seed=9),
    "logit bias": SamplingParams(temperature=1.0, logit_bias={5: 3.0, 30: -8.0, EOS: 1.0}, seed=10),
    "largest seed": SamplingParams(temperature=1.0, seed=2**64 - 1),
}
DRAFTS = {
    "own": lambda texts: Speculation(BLOCK),
    "right": given,
    "wrong": lambda texts: given(texts, num_right=0),
    "half right": lambda texts: given(texts, num_right=lambda request_id, anchor: anchor % (BLOCK + 1)),
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("model_name", MODELS)
def test_speculation_changes_no_token_of_any_sampler(model_name, drafts):
    """All kinds of parameters share every pass; each request gets what it gets alone, log-probabilities included."""
    key, texts, outcomes = MODELS[model_name], {}, {}
    for name, params in SAMPLINGS.items():
        stream = stream_of(key, PROMPT, params, COUNT)
        texts[name] = stream.all_ids
        outcomes[name] = cut(stream, replace(params, max_tokens=COUNT, logprobs=4), MAX_LEN)
    engine = tiny_engine(key, DRAFTS[drafts](texts), num_slots=len(SAMPLINGS))
    for name, params in SAMPLINGS.items():
        engine.add(name, PROMPT, replace(params, max_tokens=COUNT, logprobs=4), MAX_LEN)
        engine.start(name)
    finish(engine, SAMPLINGS)
    for name, outcome in outcomes.items():
        request = engine.requests[name]
        assert tuple(request.output_ids) == outcome.token_ids, name
        assert request.logprobs == list(outcome.logprobs), name
        assert request.finish_reason == outcome.finish_reason, name
    accepted = {name: sum(engine.requests[name].statistics.accepted) for name in SAMPLINGS}
    assert drafts != "wrong" or not any(accepted.values())
    assert drafts != "right" or min(accepted.values()) > 0


def test_parameters_make_a_difference():
    """The comparison above would be empty if all requests said the same."""
    streams = {tuple(stream_of(MODELS["v41"], PROMPT, params, COUNT).token_ids) for params in SAMPLINGS.values()}
    assert len(streams) >= len(SAMPLINGS) - 1


@pytest.mark.parametrize("model_name", MODELS)
def test_the_seed_alone_decides(model_name):
    """The same seed gives the same text twice in one batch, later, and in another slot; another seed does not."""
    key, params = MODELS[model_name], SamplingParams(temperature=1.0, seed=21, max_tokens=COUNT)
    engine = tiny_engine(key, num_slots=5)
    for name, seed in (("a", 21), ("b", 22), ("c", 21)):
        engine.add(name, PROMPT, replace(params, seed=seed), MAX_LEN)
        engine.start(name)
    finish(engine, "abc")
    engine.add("later", PROMPT, params, MAX_LEN)
    engine.start("later")
    finish(engine, ["later"])
    outputs = {name: engine.requests[name].output_ids for name in ("a", "b", "c", "later")}
    assert outputs["a"] == outputs["c"] == outputs["later"] != outputs["b"]


def test_penalties_count_the_drafts_before_a_row():
    """A strong penalty forbids what came before; inside one accepted block the drafts have come before."""
    key, params = MODELS["v41"], SamplingParams(presence_penalty=2.0, logit_bias={5: 9.0, 6: 8.5, 9: 8.0, 10: 7.5})
    stream = stream_of(key, PROMPT, params, COUNT)
    assert len(set(stream.token_ids[:6])) > 1
    engine = tiny_engine(key, given({"a": stream.all_ids}))
    engine.add("a", PROMPT, replace(params, max_tokens=COUNT), MAX_LEN)
    engine.start("a")
    finish(engine, "a")
    assert engine.requests["a"].output_ids == stream.token_ids
    assert engine.requests["a"].statistics.accepted[BLOCK - 1] > 0
