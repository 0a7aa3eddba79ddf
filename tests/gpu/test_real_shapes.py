"""The law at real widths: layers of every kind of the published models, fewer experts, random weights in their storage.

Each request gives, bit for bit, what it gives alone, op by op and without speculation on the same device.
"""

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.bench.dummy_weights import dummy_model
from dspark.bench.geometry import cut_engram, read_geometry
from dspark.bench.random_text import RandomText
from dspark.config import Config
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import build_loop
from dspark.engine.device import place
from dspark.engine.request import Emission
from dspark.engine.speculation import Speculation
from dspark.layers.plans import ModelPlan
from dspark.models.build import Model
from dspark.speculative.proposer import ContinuationProposer
from support.engines import run_out

pytestmark = pytest.mark.gpu

# More than the indexer picks, fewer than a window, and some between.
PROMPT_LENS = (2300, 9, 700, 131)
NUM_TOKENS, MAX_LEN = 40, 2560
# The first layers that have every kind of attention and routing, and every source that later layers read.
NUM_LAYERS = {"v4-flash": 6, "v41-flash": 25}
NUM_EXPERTS, ENGRAM_ROWS = 24, 100_000
Answer = tuple[tuple[int, ...], tuple[Any, ...]]


def cut_plan(name: str, folder: Path) -> ModelPlan:
    """A published geometry with fewer layers and experts and short tables; every other number is its own."""
    config = json.loads((files("dspark") / "assets" / "geometries" / f"{name}.json").read_text())
    text = config.get("text_config", config)
    for key in text.keys() & {"n_routed_experts", "dspark_n_routed_experts"}:
        text[key] = NUM_EXPERTS
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return cut_engram(read_geometry(str(file), NUM_LAYERS[name]), ENGRAM_ROWS).plan


@pytest.fixture(scope="module", params=NUM_LAYERS)
def model(request, tmp_path_factory) -> Iterator[Model]:
    placement = place(Config(device="cuda"))
    plan = cut_plan(request.param, tmp_path_factory.mktemp(request.param))
    with torch.no_grad():
        yield dummy_model(plan, placement.ops, placement.dtype, placement.device)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(model.plan.vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENS]


def params_of(number: int, has_logprobs: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        temperature=float(number % 2),
        seed=number,
        logprobs=0 if has_logprobs else None,
    )


def answers(
    model: Model,
    prompts: Mapping[int, Sequence[int]],
    speculation: Speculation,
    *,
    is_eager: bool = False,
    num_rows: int = 2048,
    has_logprobs: bool = True,
) -> dict[int, Answer]:
    """Tokens and their log-probabilities of requests that run together."""
    config = Config(
        max_num_seqs=len(prompts),
        max_num_batched_tokens=num_rows,
        max_model_len=MAX_LEN,
        max_num_pages=len(prompts) * MAX_LEN // 64,
        enable_prefix_caching=False,
        enforce_eager=is_eager,
    )
    device = next(model.parameters()).device
    loop = build_loop(model, RandomText(model.plan.vocab_size), config, speculation, MAX_LEN, device)
    for number, prompt in prompts.items():
        loop.add(number, prompt, params_of(number, has_logprobs))
    return {number: joined(emissions) for number, emissions in run_out(loop).items()}


def joined(emissions: Sequence[Emission]) -> Answer:
    return (
        tuple(token for emission in emissions for token in emission.token_ids),
        tuple(one for emission in emissions for one in emission.logprobs),
    )


@pytest.fixture(scope="module")
def alone(model, prompts) -> dict[int, Answer]:
    found = {}
    for number, prompt in enumerate(prompts):
        found |= answers(model, {number: prompt}, Speculation(), is_eager=True)
    return found


def given(model: Model, prompts: Sequence[Sequence[int]], alone: Mapping[int, Answer]) -> Speculation:
    """Drafts of which 0 to 5 are right, by position."""
    texts = {number: [*prompt, *alone[number][0]] for number, prompt in enumerate(prompts)}
    block = model.plan.draft.block_size

    def num_right(number: int, position: int) -> int:
        return (7 * position + number) % (block + 1)

    return Speculation(block, ContinuationProposer(texts, block, model.plan.vocab_size, num_right=num_right))


def test_together(model, prompts, alone):
    assert answers(model, dict(enumerate(prompts)), Speculation()) == alone


def test_rounds_that_run_ahead(model, prompts, alone):
    own = Speculation(model.plan.draft.block_size)
    found = answers(model, dict(enumerate(prompts)), own, has_logprobs=False)
    assert {number: tokens for number, (tokens, _) in found.items()} == {n: tokens for n, (tokens, _) in alone.items()}


@pytest.mark.parametrize("drafts", ["own", "right and wrong"])
def test_drafts(model, prompts, alone, drafts):
    own = Speculation(model.plan.draft.block_size)
    speculation = own if drafts == "own" else given(model, prompts, alone)
    assert answers(model, dict(enumerate(prompts)), speculation) == alone


def test_small_chunks_op_by_op(model, prompts, alone):
    speculation = given(model, prompts, alone)
    assert answers(model, dict(enumerate(prompts)), speculation, is_eager=True, num_rows=72) == alone
