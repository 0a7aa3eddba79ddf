"""Captured rounds that run ahead of the host: each request gives what it gives alone, whatever comes between."""

import random

import pytest
import torch

from dspark.config.sampling import SamplingParams
from dspark.engine.graphs import GraphPlan
from support.loops import LoopDrive
from support.schedules import make_wish
from support.tiny_models import MAX_LEN

pytestmark = pytest.mark.gpu

MODELS = {
    "v41": ("v41", False, torch.float32, 0, "cuda"),
    "v41 quantised bf16": ("v41", True, torch.bfloat16, 0, "cuda"),
    "v4 quantised bf16": ("v4", True, torch.bfloat16, 0, "cuda"),
}
PROMPT = [11, 40, 8, 8, 62, 33, 5, 29, 71, 2, 18, 50, 47, 9, 66]
SAMPLINGS = [
    SamplingParams(max_tokens=22),
    SamplingParams(max_tokens=22, temperature=0.8, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=22, temperature=1.0, top_k=12, top_p=0.9, seed=5),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model_name", MODELS)
def test_the_serving_loop(model_name, seed):
    rng = random.Random(seed)
    wishes = [make_wish(MODELS[model_name], PROMPT[: rng.randint(1, 15)], one, 23) for one in SAMPLINGS]
    LoopDrive(MODELS[model_name], rng, wishes, GraphPlan((1, 2, 3, 6, 12, 24), MAX_LEN)).run()
