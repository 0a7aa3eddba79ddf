"""The embedded model through the public interface, on an accelerator: batches, drafts and chunks change no token."""

import pytest

from dspark import CompilationConfig, Config, CUDAGraphMode, SamplingParams, SpeculativeConfig
from dspark.engine import LLM

pytestmark = pytest.mark.gpu

PROMPTS = [
    "def fibonacci(n):",
    "The harbour was quiet when",
    "Question: A farmer has 12 sheep and buys 7 more. How many has he?\nAnswer:",
    "import os\n\ndef walk(path):\n",
    "x",
    "The `Config` class holds all settings. " * 12,
]
GRAPHS = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
SAMPLINGS = [SamplingParams(max_tokens=48), SamplingParams(max_tokens=48, temperature=1.0, top_p=0.95, seed=11)]


def tokens_of(llm, prompts, params):
    return [completion.token_ids for completion in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone():
    """Every request in a call of its own, without speculation."""
    llm = LLM(device="cuda", draft="off", enforce_eager=True)
    return [[tokens_of(llm, [prompt], params)[0] for prompt in PROMPTS] for params in SAMPLINGS]


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "off", "enforce_eager": True},
        {"draft": "dspark", "enforce_eager": True},
        {"config": Config(speculative_config=SpeculativeConfig(num_speculative_tokens=5))},
        {"draft": "dspark", "max_num_batched_tokens": 24, "max_num_seqs": 3, "enforce_eager": True},
        {"draft": "off"},
        {"draft": "dspark", "compilation_config": GRAPHS},
    ],
    ids=["batch", "drafts", "all drafts in graphs", "small chunks", "graphs", "drafts in graphs"],
)
def test_tokens_are_those_of_the_request_alone(alone, settings):
    llm = LLM(device="cuda", **settings)
    assert llm.device.startswith("cuda")
    for params, expected in zip(SAMPLINGS, alone, strict=True):
        assert tokens_of(llm, PROMPTS, params) == expected
        assert tokens_of(llm, PROMPTS[::-1], params) == expected[::-1]
