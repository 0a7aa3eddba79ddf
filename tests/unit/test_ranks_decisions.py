"""Rank 0 decides tokens, verdicts, drafts and lengths of rounds on the device; the others' own do not matter."""

from dataclasses import replace

import pytest
import torch

from dspark.config import Config, SpeculativeConfig
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import assemble, build_loop
from dspark.engine.graphs import GraphPlan
from dspark.parallel.decisions import decided
from dspark.parallel.group import ALONE
from dspark.speculative.lengths import ThresholdLengths
from support import rank_calls
from support.divisible_models import write_divisible_checkpoint
from support.engines import run_out

MAX_LEN = 128
AHEAD = GraphPlan((1, 2, 3, 6, 12, 18), MAX_LEN, is_captured=False)
WISHES = [([5 + number] * (3 + 4 * number), float(number % 2)) for number in range(3)]


def test_one_rank_keeps_its_own():
    values = torch.arange(3), torch.ones(2, 3, dtype=torch.int64)
    assert all(one is other for one, other in zip(decided(ALONE, *values), values, strict=True))


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    folder = write_divisible_checkpoint(tmp_path_factory.mktemp("model") / "v41", "v41")
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 3}
    speculative = SpeculativeConfig()
    return assemble(config=Config(str(folder), tensor_parallel_size=2, speculative_config=speculative, **sizes))


def decode(assembly, speculation, is_disturbed):
    """Tokens of all requests, how many rounds were launched, and what each rank has left."""
    model, device, share = assembly.loop.engine.model, assembly.placement.device, assembly.share
    sizes = assembly.tokenizer, assembly.config, speculation, assembly.max_model_len, device
    loop = build_loop(model, *sizes, shapes=AHEAD, share=share)
    launches, launch = [], loop._ahead._rounds.launch
    loop._ahead._rounds.launch = lambda shape: (launches.append(shape), launch(shape))
    part = loop.engine.share
    if is_disturbed:
        part.ask(rank_calls.disturb_logits, 1)
    for number, (prompt, temperature) in enumerate(WISHES):
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=number)
        loop.add(number, prompt, params)
    emissions = run_out(loop)
    if is_disturbed:
        part.ask(rank_calls.restore_logits, 1)
    tokens = {number: [one for each in emissions[number] for one in each.token_ids] for number in emissions}
    return tokens, len(launches), part.ask(rank_calls.traces)


@pytest.mark.parametrize("way", ["plain", "drafts", "lengths by confidence"])
def test_a_rank_that_sees_other_logits_follows(assembly, way):
    speculation = assembly.speculation
    if way == "plain":
        speculation = replace(speculation, num_speculative_tokens=0)
    if way.startswith("lengths"):
        speculation = replace(speculation, lengths=ThresholdLengths(0.6))
    wanted, num_rounds, _ = decode(assembly, speculation, is_disturbed=False)
    found, num_disturbed, (own, other) = decode(assembly, speculation, is_disturbed=True)
    assert found == wanted and num_rounds == num_disturbed > 5
    assert other == own
