"""The law for passes of a fixed shape, as graphs run them: padded to a row count, addressed by tensors alone.

Graphs themselves need an accelerator (`tests/gpu/test_graphs.py`); what they would capture runs anywhere, one op after
the other. Each request gives, bit for bit, what it gives alone in passes that know it by name.
"""

import random

import pytest

from dspark.config.sampling import SamplingParams
from dspark.engine.graphs import GraphPlan
from support.loops import LoopDrive
from support.schedules import Drive, make_wish
from support.tiny_models import MAX_LEN

SHAPES = GraphPlan((1, 3, 8, 13), MAX_LEN, is_captured=False)
PIECES = GraphPlan((), MAX_LEN, is_captured=False, runs_ahead=False, piece_counts=(2, 7, 19))
BOTH = GraphPlan((1, 3, 8), MAX_LEN, is_captured=False, piece_counts=(4, 16, 24))
MODELS = {
    "v41": ("v41",),
    "v41 quantised": ("v41", True),
    "v4": ("v4",),
    "v4 quantised": ("v4", True),
}
PROMPT = [11, 40, 8, 8, 62, 33, 5, 29, 71, 2, 18, 50, 47, 9, 66]
SAMPLINGS = [
    SamplingParams(max_tokens=13, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=13, temperature=0.8, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True),
]


RUNS_AHEAD = [
    SamplingParams(max_tokens=13),
    SamplingParams(max_tokens=13, temperature=0.8, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=13, temperature=1.0, top_k=12, top_p=0.9, seed=5),
]


def wishes_of(model_name, seed, samplings=None):
    """Every other schedule has a request whose draws need more than a temperature."""
    samplings = samplings or (SAMPLINGS if seed % 2 else SAMPLINGS[:2])
    pairs = [(count, samplings[place % len(samplings)]) for place, count in enumerate((1, 6, 15))]
    return [make_wish(MODELS[model_name], PROMPT[:count], params, 14) for count, params in pairs]


@pytest.mark.parametrize("drafts", ["own", "given"])
@pytest.mark.parametrize("model_name", MODELS)
def test_any_schedule(model_name, drafts):
    for seed in range(4):
        Drive(MODELS[model_name], random.Random(seed), wishes_of(model_name, seed), drafts, SHAPES).run()


@pytest.mark.parametrize("shapes", [PIECES, BOTH])
@pytest.mark.parametrize("model_name", MODELS)
def test_any_schedule_in_pieces(model_name, shapes):
    """Passes over any spans, padded to the rows of pieces; longer ones run as they are."""
    for seed in range(4):
        drafts = ["own", "given"][seed % 2]
        Drive(MODELS[model_name], random.Random(seed), wishes_of(model_name, seed), drafts, shapes).run()


@pytest.mark.parametrize("model_name", MODELS)
def test_the_serving_loop(model_name):
    for seed in range(3):
        LoopDrive(MODELS[model_name], random.Random(seed), wishes_of(model_name, seed), SHAPES).run()


@pytest.mark.parametrize("model_name", MODELS)
def test_the_serving_loop_whose_rounds_run_ahead(model_name):
    """Requests that the device can draw by itself, so that windows begin and end all the time."""
    for seed in range(4):
        LoopDrive(MODELS[model_name], random.Random(seed), wishes_of(model_name, seed, RUNS_AHEAD), SHAPES).run()
