"""Two engines in processes of their own, kept by Ray Serve: one is killed under load, and nobody notices.

Skipped where ray is not installed.
"""

import asyncio
import os
import signal
from importlib import import_module

import pytest

from dspark import LLM, SamplingParams
from dspark.engine.assembly import outline
from dspark.serve.replicas.fleet import Fleet

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
pytest.importorskip("ray.serve", reason="needs the extra 'ray'")

SETTINGS = {"max_num_seqs": 4, "max_model_len": 512}
PROMPTS = ["def fibonacci(n):", "The sum of two even numbers is", "Once upon a time", "import os\n"]
PARAMS = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(3)]


@pytest.fixture(scope="module")
def expected():
    """Each request alone, without speculation."""
    llm = LLM(draft="off", max_num_seqs=1, max_model_len=512, enable_prefix_caching=False)
    return {(prompt, own.seed): llm.generate(prompt, own)[0].token_ids for prompt in PROMPTS for own in PARAMS}


async def read(fleet, prompt, params, begun):
    stream = await fleet.submit([prompt], [[params]])
    tokens = []
    with stream:
        async for _, emission in stream:
            tokens += emission.token_ids
            begun.set()
    return tokens


async def scenario(fleet, replicas, expected):
    await fleet.start()
    pids = [await replica.process_id() for replica in replicas]
    assert len({*pids, os.getpid()}) == 3
    begun = asyncio.Event()
    jobs = {
        (prompt, own.seed): asyncio.create_task(read(fleet, prompt, own, begun)) for prompt in PROMPTS for own in PARAMS
    }
    await begun.wait()
    os.kill(pids[0], signal.SIGKILL)
    assert {key: await job for key, job in jobs.items()} == expected
    for _ in range(120):
        if (await fleet.refresh(5.0)).state == "ready":
            break
        await asyncio.sleep(0.5)
    assert fleet.status().state == "ready", "the dead replica is not restarted"
    assert await replicas[0].process_id() != pids[0]
    again = await asyncio.gather(*(read(fleet, prompt, PARAMS[0], begun) for prompt in PROMPTS))
    assert again == [expected[prompt, 0] for prompt in PROMPTS]
    assert await fleet.drain(30)


def test_the_death_of_one_replica_under_load(expected):
    ray_serve = import_module("dspark.serve.replicas.ray_serve")
    try:
        replicas = ray_serve.start_replicas(2, SETTINGS, max_requests=64)
        fleet = Fleet(outline(**SETTINGS), replicas)
        asyncio.run(asyncio.wait_for(scenario(fleet, replicas, expected), 240))
    finally:
        ray_serve.stop_ray()
