"""Captured passes under the law: each request gives, bit for bit, what it gives alone and eagerly on the device."""

import random

import pytest
import torch

from dspark.config.sampling import SamplingParams
from dspark.engine.graphs import GraphPlan
from support.loops import LoopDrive
from support.schedules import Drive, make_wish
from support.tiny_models import MAX_LEN

pytestmark = pytest.mark.gpu

MODELS = {
    "v41": ("v41", False, torch.float32, 0, "cuda"),
    "v41 quantised bf16": ("v41", True, torch.bfloat16, 0, "cuda"),
    "v4": ("v4", False, torch.float32, 0, "cuda"),
    "v4 quantised bf16": ("v4", True, torch.bfloat16, 0, "cuda"),
}
PROMPT = [11, 40, 8, 8, 62, 33, 5, 29, 71, 2, 18, 50, 47, 9, 66]
SAMPLINGS = [
    SamplingParams(max_tokens=13, temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=13, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=13, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=0.8, repetition_penalty=1.2, seed=7),
]


@pytest.fixture
def graphs():
    return GraphPlan((1, 2, 3, 5, 8, 13, 21), MAX_LEN)


@pytest.fixture(params=["pieces", "both"])
def pieces(request):
    whole = (1, 2, 3, 5, 8) if request.param == "both" else ()
    return GraphPlan(whole, MAX_LEN, runs_ahead=bool(whole), piece_counts=(2, 5, 12, 24, 40))


def wishes_of(model_name, rng):
    counts = [rng.randint(1, len(PROMPT)) for _ in range(4)]
    # Some schedules draw all blocks inside graphs: those of the first two kinds of requests.
    kinds = rng.choice([2, 4])
    return [make_wish(MODELS[model_name], PROMPT[:count], SAMPLINGS[count % kinds], 14) for count in counts]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", ["own", "given", "none"])
@pytest.mark.parametrize("model_name", MODELS)
def test_any_schedule(model_name, drafts, seed, graphs):
    rng = random.Random(seed)
    Drive(MODELS[model_name], rng, wishes_of(model_name, rng), drafts, graphs).run()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model_name", MODELS)
def test_the_serving_loop(model_name, seed, graphs):
    rng = random.Random(seed)
    LoopDrive(MODELS[model_name], rng, wishes_of(model_name, rng), graphs).run()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model_name", MODELS)
def test_any_schedule_in_pieces(model_name, seed, pieces):
    rng = random.Random(seed)
    Drive(MODELS[model_name], rng, wishes_of(model_name, rng), "own", pieces).run()
