"""The law on an accelerator: the schedules of `tests/property/test_law_schedules.py` with kernels instead of twins.

Each request gives, bit for bit, what it gives alone on the same device, one row a pass and without speculation. Not
promised: that two devices agree.
"""

import random
from importlib.util import find_spec

import pytest
import torch

from dspark.config.sampling import SamplingParams
from dspark.config.structured import StructuredOutput
from support.loops import LoopDrive
from support.schedules import Drive, make_wish
from support.tiny_models import EOS, NUM_VALID

pytestmark = pytest.mark.gpu

MODELS = {
    "v41": ("v41", False, torch.float32, 0, "cuda"),
    "v41 quantised bf16": ("v41", True, torch.bfloat16, 0, "cuda"),
    "v4": ("v4", False, torch.float32, 0, "cuda"),
    "v4 quantised bf16": ("v4", True, torch.bfloat16, 0, "cuda"),
}
STREAM_LEN = 14
TEXT = [int(x) for x in torch.randint(2, NUM_VALID, (40,), generator=torch.Generator().manual_seed(9))]
# Prompts share first tokens, so that one request's image serves another.
PROMPTS = [TEXT[:1], TEXT[:7], TEXT[:12], TEXT[:23], TEXT[30:33], TEXT[20:37]]
SAMPLINGS = [
    SamplingParams(max_tokens=13, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.6, top_p=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=1.0, top_k=8, min_p=0.02, seed=2**63 + 11),
    SamplingParams(max_tokens=13, repetition_penalty=1.4, frequency_penalty=0.6, logit_bias={9: 1.5, 30: -2.0}),
    SamplingParams(max_tokens=13, temperature=1.0, repetition_penalty=1.2, top_p=0.95, seed=1, logprobs=0),
    SamplingParams(max_tokens=13, temperature=1.0, seed=3, logit_bias={EOS: 4.0}),
    SamplingParams(max_tokens=13, temperature=1.0, seed=8, sampler="ratio"),
    SamplingParams(max_tokens=9, temperature=1.0, seed=12, prompt_logprobs=2, logprobs=1),
]
# Optional on a machine that only computes.
if find_spec("llguidance"):
    SAMPLINGS += [
        SamplingParams(
            max_tokens=13, temperature=1.0, seed=13, structured=StructuredOutput.regex("([A-Z]{2}[a-z3-9]?)+")
        ),
        SamplingParams(
            max_tokens=13,
            temperature=1.0,
            seed=15,
            sampler="ratio",
            structured=StructuredOutput.regex("[A-Z]+[a-z]{3}"),
        ),
    ]
PAIRS = list(zip(PROMPTS * 2, SAMPLINGS, strict=False))


def wishes_of(model_name, rng, count):
    """Requests with the answers that they get alone."""
    chosen = [PAIRS[rng.randrange(len(PAIRS))] for _ in range(count)]
    return [make_wish(MODELS[model_name], prompt, params, STREAM_LEN) for prompt, params in chosen]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafts", ["own", "given", "none"])
@pytest.mark.parametrize("model_name", MODELS)
def test_any_schedule(model_name, drafts, seed):
    rng = random.Random(seed)
    Drive(MODELS[model_name], rng, wishes_of(model_name, rng, rng.choice([2, 3, 4])), drafts).run()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model_name", MODELS)
def test_the_serving_loop(model_name, seed):
    rng = random.Random(seed)
    LoopDrive(MODELS[model_name], rng, wishes_of(model_name, rng, rng.choice([3, 5, 8]))).run()
