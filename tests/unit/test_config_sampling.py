"""SamplingParams refuses nonsense by the name of the field, and keeps what it was given."""

import math
import pickle

import pytest

from dspark.config import ConfigError, SamplingParams

NONSENSE = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.5),
    ("min_p", 2.0),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", [1, 2]),
    ("seed", -1),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("stop", ("",)),
    ("stop", 7),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("logprobs", -1),
    ("logprobs", 1000),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("structured", "json_object"),
    ("structured", {"type": "object"}),
    ("sampler", "greedy"),
]


@pytest.mark.parametrize(("name", "value"), NONSENSE)
def test_nonsense_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


def test_one_stop_string_is_not_read_as_its_letters():
    assert SamplingParams(stop="END").stop == ("END",)


def test_lists_become_tuples_and_the_bias_is_copied():
    bias = {5: 1, 2: -3.5}
    params = SamplingParams(stop=["a"], stop_token_ids=[1, 2], logit_bias=bias)
    bias[9] = 1.0
    assert (params.stop, params.stop_token_ids) == (("a",), (1, 2))
    assert params.logit_bias == {2: -3.5, 5: 1.0}


def test_params_travel_between_processes():
    params = SamplingParams(temperature=0.6, logit_bias={1: 2.0}, stop=("x",))
    assert pickle.loads(pickle.dumps(params)) == params


def test_defaults_are_greedy_without_penalties():
    assert SamplingParams().is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(presence_penalty=0.5).has_penalties
