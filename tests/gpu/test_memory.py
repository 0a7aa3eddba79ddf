"""Memory of a device: what was planned is what is taken, whatever is launched; tables of the host change no token."""

import pytest
import torch

from dspark import CompilationConfig, Config, SamplingParams
from dspark.engine import LLM

pytestmark = pytest.mark.gpu

PROMPTS = [[3, 14, 15, 9, 26, 5, 35, 8] * 30, [27, 18, 28]]
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)


def answers(**settings):
    llm = LLM(config=Config(device="cuda", max_num_seqs=4, max_model_len=1024, **settings))
    found = [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, PARAMS)]
    return llm, found


def test_an_engine_stays_within_its_plan():
    llm, _ = answers()
    plan = llm.loop.memory
    assert plan.is_measured and plan.workspaces > 0
    assert plan.weights + plan.state + plan.workspaces + plan.margin + plan.left <= plan.total
    free, _ = torch.cuda.mem_get_info()
    assert free >= plan.margin


@pytest.mark.parametrize("settings", [{"engram_tables": "pinned"}, {"engram_tables": "mapped", "enforce_eager": True}])
def test_tables_of_the_host_change_no_token(settings):
    assert answers(**settings)[1] == answers()[1]


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_pieces_change_no_token(mode):
    assert answers(compilation_config=CompilationConfig(cudagraph_mode=mode))[1] == answers(enforce_eager=True)[1]
