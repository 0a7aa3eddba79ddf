"""Two accelerators, one engine: tokens follow from the request alone, and the end of a rank is that of the engine."""

import os
import subprocess
import sys
import time

import pytest
import torch

from dspark import SamplingParams
from dspark.engine import LLM
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint
from support.rank_teams import is_alive, wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two accelerators"),
]

PROGRAM = """
import os, signal, sys, threading, time
from dspark import SamplingParams
from dspark.engine import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, max_num_seqs=2, max_model_len=512, rank_timeout_s=5.0)
params = SamplingParams(max_tokens=400, ignore_eos=True)
llm.generate([[5, 6, 7]], params)
victim = llm.loop.engine.share.team.process_ids[0]
def strike():
    time.sleep(0.3)
    print(victim, flush=True)
    os.kill(victim, getattr(signal, sys.argv[2]))
threading.Thread(target=strike).start()
while True:
    llm.generate([[5, 6, 7]], params)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TINY_NAMES[0], ranks=2)


def test_neither_company_nor_drafts_nor_graphs_change_a_token(folder):
    prompts = [[5 + number, 6, 7 + 3 * number] * (1 + 9 * number) for number in range(4)]
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=float(number % 2), seed=number)
        for number in range(4)
    ]
    sizes = {"tensor_parallel_size": 2, "max_num_seqs": 4, "max_model_len": 512}
    drafted = LLM(folder, **sizes)
    tokens = [completion.token_ids for completion in drafted.generate(prompts, params)]
    alone = [drafted.generate([prompt], [own])[0].token_ids for prompt, own in zip(prompts, params, strict=True)]
    assert tokens == alone
    for other in ({"draft": "off"}, {"enforce_eager": True}):
        assert [one.token_ids for one in LLM(folder, **sizes, **other).generate(prompts, params)] == tokens


@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_ends_or_hangs_ends_the_engine(folder, blow):
    path = os.pathsep.join(part for part in sys.path if part)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), blow],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        first = process.stdout.readline()
        assert first, process.stderr.read()
        victim = int(first)
        began = time.monotonic()
        told = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    seconds = time.monotonic() - began
    wanted = "has ended by signal SIGKILL" if blow == "SIGKILL" else "has not answered for"
    assert process.returncode != 0 and f"rank 1 of 2 {wanted}" in told, told
    assert seconds < 20.0
    print(f"{blow}: over after {seconds:.1f} s, exit code {process.returncode}")
    wait_for(lambda: not is_alive(victim))
