"""Engines of two ranks from the outside: the Python surface, the asynchronous engine, the command line."""

import asyncio
import os
import signal

import pytest
from typer.testing import CliRunner

from dspark.cli.app import app
from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.engine import LLM
from dspark.engine.async_engine import AsyncEngine
from dspark.engine.loop_thread import EngineDeadError
from dspark.engine.ranks.failure import RankError
from support.divisible_models import write_divisible_checkpoint

PROMPTS = [[1, 20, 30], [5] * 17, [2, 9]]
SIZES = {"tensor_parallel_size": 2, "max_model_len": 128, "max_num_seqs": 3, "rank_timeout_s": 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_divisible_checkpoint(tmp_path_factory.mktemp("model") / "v41", "v41")


def tokens(llm):
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=float(n % 2), seed=n) for n in range(len(PROMPTS))
    ]
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


def test_drafts_and_whole_experts_change_only_speed(folder):
    drafted = tokens(LLM(folder, **SIZES))
    assert tokens(LLM(folder, draft="off", **SIZES)) == drafted
    whole = LLM(folder, enable_expert_parallel=True, **SIZES)
    assert tokens(whole) == tokens(LLM(folder, draft="off", enable_expert_parallel=True, **SIZES))


def test_engines_of_a_process_share_its_ranks(folder):
    first, second = LLM(folder, **SIZES), LLM(folder, **SIZES)
    assert first.loop.engine.share.team is second.loop.engine.share.team
    with pytest.raises(RankError, match="this process has an engine of 2 ranks on cpu"):
        LLM(folder, **(SIZES | {"tensor_parallel_size": 4}))


def test_the_embedded_model_is_not_divided():
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not divide this model"):
        LLM(tensor_parallel_size=2)


def test_a_lost_rank_ends_the_engine_and_another_can_be_made(folder):
    llm = LLM(folder, **SIZES)
    before = tokens(llm)
    os.kill(llm.loop.engine.share.team.process_ids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 of 2 has ended by signal SIGKILL; the engine has ended on all ranks"):
        tokens(llm)
    assert tokens(LLM(folder, **SIZES)) == before


def test_a_lost_rank_ends_every_stream(folder):
    async def run():
        async with AsyncEngine(folder, **SIZES) as engine:
            stream = engine.generate([1, 20, 30], SamplingParams(max_tokens=100, ignore_eos=True))
            await anext(stream)
            os.kill(engine.assembly.share.team.process_ids[0], signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended"):
                async for _ in stream:
                    pass
            assert engine.status().state == "dead"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_command_line(folder):
    options = ["--tensor-parallel-size", "2", "--max-tokens", "8", "--compare"]
    done = CliRunner().invoke(app, ["generate", "w1 w2 w3", "--model", str(folder), *options])
    assert done.exit_code == 0, done.output
    assert "all 8 tokens are identical" in done.output
