"""Two engines in processes of their own, kept by Ray Serve: one is killed under load, and nobody notices.

Skipped where ray is not installed.
"""

import asyncio
import os
import signal
from importlib import import_module
from pathlib import Path

import pytest

from dspark import LLM, SamplingParams
from dspark.config.errors import DSparkError
from dspark.engine.assembly import outline
from dspark.serve.replicas.fleet import Fleet
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint
from support.rank_teams import is_alive, wait_for

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
pytest.importorskip("ray.serve", reason="needs the extra 'ray'")

SETTINGS = {"max_num_seqs": 4, "max_model_len": 512}
PROMPTS = ["def fibonacci(n):", "The sum of two even numbers is", "Once upon a time", "import os\n"]
PARAMS = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(3)]

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


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


def followers_of(process_id):
    """Processes that a replica has started and that follow it."""
    threads = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    return [int(child) for child in children if b"follower" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def answers(fleet, replicas):
    await fleet.start()
    followers = [followers_of(await replica.process_id()) for replica in replicas]
    begun = asyncio.Event()
    found = await asyncio.gather(*(read(fleet, [5, 6, 7 + number], SHORT, begun) for number in range(4)))
    return found, followers


def test_replicas_of_two_ranks(tmp_path):
    """Each has a follower of its own, which ends with it."""
    folder = write_tiny_checkpoint(tmp_path / "model", TINY_NAMES[0], ranks=2)
    settings = SETTINGS | {"model": folder, "tensor_parallel_size": 2}
    llm = LLM(**settings)
    wanted = [llm.generate([[5, 6, 7 + number]], SHORT)[0].token_ids for number in range(4)]
    ray_serve = import_module("dspark.serve.replicas.ray_serve")
    try:
        replicas = ray_serve.start_replicas(2, settings, max_requests=64)
        fleet = Fleet(outline(**settings), replicas)
        found, followers = asyncio.run(asyncio.wait_for(answers(fleet, replicas), 120))
    finally:
        ray_serve.stop_ray()
    assert found == wanted and [len(own) for own in followers] == [1, 1]
    wait_for(lambda: not any(is_alive(follower) for own in followers for follower in own))


def test_replicas_have_whole_machines_for_their_ranks(monkeypatch):
    """Devices of two machines do not add up; a machine that is gone has none."""
    ray_serve = import_module("dspark.serve.replicas.ray_serve")
    nodes = [(3.0, True), (3.0, True), (8.0, False)]
    found = [{"Resources": {"GPU": number}, "Alive": is_alive} for number, is_alive in nodes]
    monkeypatch.setattr(ray_serve.ray, "nodes", lambda: [*found, {"Resources": {"CPU": 4.0}, "Alive": True}])
    ray_serve.require_room(2, 2)
    ray_serve.require_room(9, 0)
    with pytest.raises(DSparkError, match=r"3 replicas of 2 devices each are asked for .* have room for 2: give fewer"):
        ray_serve.require_room(3, 2)
