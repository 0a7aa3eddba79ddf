"""The law: a request's tokens, text, ending, log-probabilities and drafts are its own, whatever the schedule.

Requests arrive in any order, share passes with others, are cut into chunks of any size, verify any number of right
and wrong drafts, are preempted, replayed, restored from images of their own or of others' first tokens, forked and
aborted, while storage that nobody may read is full of garbage. Each gives, bit for bit, what it gives alone, one row
a pass, without speculation. Not promised here: the tokens of the ratio test, which only keeps the others company.
"""

import random
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.config.sampling import SamplingParams
from dspark.config.structured import StructuredOutput
from support.alone import stream_of
from support.loops import LoopDrive
from support.schedules import Drive, make_wish
from support.tiny_models import EOS, NUM_VALID, LetterTokenizer

MODELS = {
    "v41": ("v41", False, torch.float32),
    "v41 quantised": ("v41", True, torch.float32),
    "v4": ("v4", False, torch.float32),
    "v4 quantised bf16": ("v4", True, torch.bfloat16),
}
STREAM_LEN = 14
TEXT = [int(x) for x in torch.randint(2, NUM_VALID, (40,), generator=torch.Generator().manual_seed(9))]
# Prompts share first tokens, so that one request's image serves another.
PROMPTS = [TEXT[:1], TEXT[:7], TEXT[:12], TEXT[:23], TEXT[30:33], TEXT[20:37]]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.9, seed=5),
    SamplingParams(temperature=1.0, top_k=8, min_p=0.02, seed=2**63 + 11),
    SamplingParams(repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3, logit_bias={9: 1.5, 30: -2.0}),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.4, top_p=0.95, seed=1),
    SamplingParams(temperature=1.0, seed=3, logit_bias={EOS: 4.0}),
    SamplingParams(temperature=1.0, seed=8, sampler="ratio"),
    SamplingParams(temperature=1.0, seed=13, structured=StructuredOutput.regex("[A-Z]{2,4}(_?[a-z]{1,2}|[3-9]+)*")),
    SamplingParams(structured=StructuredOutput.regex("(abc|abd|xyz|[A-F]{1,3}[x-z])+"), frequency_penalty=0.8),
    SamplingParams(
        temperature=0.8,
        seed=14,
        top_p=0.9,
        ignore_eos=True,
        structured=StructuredOutput.regex("([3-6]+|[K-Z]{2}x){1,4}"),
    ),
    SamplingParams(temperature=1.0, seed=15, sampler="ratio", structured=StructuredOutput.regex("[A-Z]+[a-z]{3}")),
]
PAIRS = list(zip(PROMPTS * 2, SAMPLINGS, strict=False))


@cache
def wish_of(model_name, pair, ending):
    """A request out of the catalogue with one of several endings, where its own stream allows them."""
    prompt, params = PAIRS[pair]
    model_key = MODELS[model_name]
    stream = stream_of(model_key, prompt, replace_sampler(params), STREAM_LEN)
    return make_wish(model_key, prompt, with_ending(params, ending, stream), STREAM_LEN)


def replace_sampler(params):
    return SamplingParams(**{**vars(params), "sampler": "keyed"})


def with_ending(params, ending, stream):
    rng = random.Random(ending)
    text = LetterTokenizer().decode(stream.token_ids[:10])
    place = rng.randrange(1, max(len(text) - 4, 2))
    stop_id = stream.token_ids[rng.randrange(min(len(stream.token_ids), 10))]
    changes = [
        {"max_tokens": rng.choice([1, 2, 3, 4])},
        {"max_tokens": STREAM_LEN, "logprobs": rng.choice([None, 0, 3]), "prompt_logprobs": rng.choice([None, 2])},
        {"max_tokens": STREAM_LEN, "logprobs": 1, **ignoring_eos(params)},
        {"max_tokens": 13, "stop": (text[place : place + rng.choice([1, 2, 3, 4])], "never")},
        {"max_tokens": 12, "stop": (text[place : place + 3], text[place + 1 : place + 2]), **ignoring_eos(params)},
        {"max_tokens": 13, "stop_token_ids": (stop_id,), "logprobs": 2, "prompt_logprobs": 0},
    ]
    return SamplingParams(**{**vars(params), **changes[ending % len(changes)]})


def ignoring_eos(params):
    """Where an output may end decides the tokens of a structured one, so those keep what they have."""
    return {} if params.structured else {"ignore_eos": True}


def schedules(max_examples):
    everything = settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    # Choices drawn one by one come out lopsided: nearly everything is preempted, hardly anything accepted. A seed
    # shrinks no further, but its schedule has a little of everything.
    return lambda test: everything(given(rng=st.integers(0, 2**32 - 1).map(random.Random))(test))


@pytest.mark.parametrize("drafts", ["own", "given"])
@pytest.mark.parametrize("model_name", MODELS)
@schedules(max_examples=30)
def test_any_schedule(model_name, drafts, rng):
    wishes = [
        wish_of(model_name, rng.randrange(len(PAIRS)), rng.randrange(24)) for _ in range(rng.choice([1, 2, 3, 4]))
    ]
    Drive(MODELS[model_name], rng, wishes, drafts).run()


@pytest.mark.parametrize("model_name", ["v41", "v4"])
@schedules(max_examples=12)
def test_any_schedule_of_plain_decoding(model_name, rng):
    wishes = [wish_of(model_name, rng.randrange(len(PAIRS)), rng.randrange(24)) for _ in range(3)]
    Drive(MODELS[model_name], rng, wishes, "none").run()


@pytest.mark.parametrize("model_name", MODELS)
@schedules(max_examples=16)
def test_the_serving_loop(model_name, rng):
    """The same with the loop that ships: any budget of rows, slots, pages and images, samples, aborts, preemption."""
    wishes = [wish_of(model_name, rng.randrange(len(PAIRS)), rng.randrange(24)) for _ in range(rng.choice([3, 5, 8]))]
    LoopDrive(MODELS[model_name], rng, wishes).run()


@pytest.mark.parametrize("model_name", ["v41", "v4 quantised bf16"])
def test_two_threads(model_name, two_threads):
    """The answers are computed on one thread; the schedule runs on two."""
    rng = random.Random(1)
    torch.set_num_threads(1)
    wishes = [wish_of(model_name, pair, 2) for pair in (1, 4)]
    torch.set_num_threads(2)
    Drive(MODELS[model_name], rng, wishes, "own").run()
