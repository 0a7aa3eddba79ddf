"""The model that ships with the package, under settings that must not change a token of it."""

import pytest

from dspark import LLM, Config, DSparkConfig, SamplingParams, SpeculativeConfig
from dspark.engine import embedded_folder
from dspark.engine.identity import engine_identity
from dspark.models.build import read_plan
from dspark.ops.opset import TORCH_OPS
from support.profiles import profile_fields, write_profile

SMALL: dict = {"max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64}
PROMPTS = ["def fibonacci(n):\n    ", "In the beginning"]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, temperature=0.8, seed=3),
]


@pytest.fixture(scope="module")
def expected():
    """Plain decoding with rows stored as they are computed."""
    return outcomes(LLM(draft="off", kv_cache_dtype="fp32", **SMALL))


def outcomes(llm):
    return [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, PARAMS)]


def test_rows_in_bf16_lose_nothing(expected):
    """Cached values of this family are fp8 and fp4 numbers, which bf16 holds exactly."""
    assert outcomes(LLM(draft="off", kv_cache_dtype="bf16", **SMALL)) == expected


def test_a_calibrated_schedule_changes_no_token(expected, tmp_path):
    base = Config(**SMALL)
    identity = engine_identity(base, read_plan(embedded_folder()), embedded_folder(), TORCH_OPS)
    fields = profile_fields(5, base.max_num_seqs, identity)
    path = write_profile(tmp_path / "profile.json", fields)
    dspark = DSparkConfig(schedule="throughput", calibration_profile=str(path))
    llm = LLM(config=Config(**SMALL, speculative_config=SpeculativeConfig(dspark_config=dspark)))
    completions = llm.generate(PROMPTS, PARAMS)
    assert [(one.token_ids, one.logprobs) for one in completions] == expected
    assert sum(one.statistics.num_accepted for one in completions) > 0
    assert len({length for one in completions for length, n in enumerate(one.statistics.verify_lens) if n}) > 1
