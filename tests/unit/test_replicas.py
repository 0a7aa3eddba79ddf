"""A fleet of engines in one process: who gets a prompt, and what a reader sees when the engine of a request dies."""

import asyncio
import contextlib
from dataclasses import asdict, fields, replace
from itertools import count

import pytest

from dspark.config import SamplingParams
from dspark.config.errors import ConfigError
from dspark.engine.assembly import Assembly
from dspark.engine.async_engine import AsyncEngine, EngineBusyError, EngineDrainingError, EngineStatus
from dspark.engine.loop_thread import EngineDeadError
from dspark.engine.request import Emission
from dspark.engine.status import LoopStatus
from dspark.serve.replicas.affinity import PrefixAffinity
from dspark.serve.replicas.fleet import Fleet
from dspark.serve.replicas.local import LocalReplica
from dspark.serve.replicas.progress import DisagreementError, SampleProgress
from dspark.serve.replicas.replica import ReplicaDownError
from dspark.serve.replicas.summary import summary_of
from dspark.speculative.health import HealthCounts
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.state.prefix_cache import PrefixStatistics
from support.engines import run_out, tiny_loop
from support.fake_loop import fake_assembly
from support.loops import outcome_of

PAGE = 8
PROMPT = [5 + number % 60 for number in range(37)]
SAMPLED = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True, logprobs=1)


class MortalReplica(LocalReplica):
    """An engine that can be told to die: its calls break off after so many parts, and it answers no more."""

    dies_after: int | None = None
    is_dead = False

    async def emissions(self, call):
        count = 0
        async with contextlib.aclosing(super().emissions(call)) as parts:
            async for part in parts:
                if self.is_dead or count == self.dies_after:
                    self.is_dead = True
                    raise ReplicaDownError("the plug was pulled")
                yield part
                count += 1

    async def status(self):
        if self.is_dead:
            raise ReplicaDownError("the plug was pulled")
        return await super().status()


def assembly_of(loop) -> Assembly:
    fields = vars(fake_assembly()) | {"loop": loop, "plan": loop.engine.model.plan, "max_model_len": loop.max_model_len}
    return Assembly(**fields)


def fleet_of(count=2, **options):
    replicas = [MortalReplica(AsyncEngine.over(assembly_of(tiny_loop("v41")))) for _ in range(count)]
    return Fleet(replicas[0].engine.assembly, replicas, **options), replicas


def run(test):
    """Run a test of a fleet that is started before and shut down after it."""

    async def whole():
        fleet, replicas = fleet_of()
        await fleet.start()
        try:
            await test(fleet, replicas)
        finally:
            await fleet.shutdown()

    asyncio.run(asyncio.wait_for(whole(), 60))


async def read(stream):
    found = {}
    with stream:
        async for index, emission in stream:
            found.setdefault(index, []).append(emission)
    return found


def alone(params, prompt=PROMPT):
    loop = tiny_loop("v41", num_slots=1)
    loop.add("alone", prompt, params)
    return outcome_of(run_out(loop)["alone"])


@pytest.mark.parametrize("dies_after", range(1, 9))
def test_a_stream_survives_the_death_of_its_replica(dies_after):
    """Nothing is lost, repeated or changed, wherever the first engine breaks off."""

    async def test(fleet, replicas):
        replicas[0].dies_after = dies_after
        found = await read(await fleet.submit([PROMPT], [[SAMPLED]]))
        assert outcome_of(found[0]) == alone(SAMPLED)
        assert replicas[0].is_dead
        assert all(len(emission.origins) == len(emission.token_ids) for emission in found[0])
        assert fleet.status().state == "degraded"

    run(test)


def test_samples_and_several_prompts_survive_too():
    async def test(fleet, replicas):
        replicas[0].dies_after = 5
        params = [SAMPLED.sample(number) for number in range(3)]
        found = await read(await fleet.submit([PROMPT, PROMPT[:20]], [params, params[:1]]))
        assert [outcome_of(found[number]) for number in range(3)] == [alone(own) for own in params]
        assert outcome_of(found[3]) == alone(params[0], PROMPT[:20])

    run(test)


def test_a_request_of_the_ratio_sampler_fails_in_a_sentence_once_it_has_begun():
    async def test(fleet, replicas):
        replicas[0].dies_after = 4
        stream = await fleet.submit([PROMPT], [[SamplingParams(temperature=1.0, sampler="ratio", max_tokens=24)]])
        with pytest.raises(EngineDeadError, match="ratio sampler cannot go on elsewhere: ask again"):
            await read(stream)
        replicas[1].dies_after = None
        assert await read(await fleet.submit([PROMPT], [[SAMPLED]]))

    run(test)


def test_when_no_replica_is_left_requests_end_with_the_reason():
    async def test(fleet, replicas):
        for replica in replicas:
            replica.dies_after = 3
        stream = await fleet.submit([PROMPT], [[SAMPLED]])
        with pytest.raises(EngineDeadError, match="no replica is up"):
            await read(stream)
        with pytest.raises(EngineDeadError, match="the plug was pulled"):
            await fleet.submit([PROMPT], [[SAMPLED]])
        assert fleet.status().state == "dead"
        replicas[0].is_dead, replicas[0].dies_after = False, None
        assert (await fleet.refresh()).state == "degraded"
        assert outcome_of((await read(await fleet.submit([PROMPT], [[SAMPLED]])))[0]) == alone(SAMPLED)

    run(test)


def test_refusals_of_an_engine_are_the_callers():
    async def test(fleet, replicas):
        with pytest.raises(ConfigError, match="the prompt has 200 tokens"):
            await fleet.submit([[5] * 200], [[SAMPLED]])
        with pytest.raises(ConfigError, match="the prompt has 200 tokens"):
            await fleet.submit([PROMPT, [5] * 200], [[SAMPLED], [SAMPLED]])
        for token in (2**70, -(2**70), 10**6):
            with pytest.raises(ConfigError, match="the prompt holds the token id"):
                await fleet.submit([[token] * 90], [[SAMPLED]])
        await asyncio.sleep(0.1)
        assert fleet.status().num_requests == 0
        assert not any(replica.is_dead for replica in replicas)

    run(test)


def test_a_reader_that_leaves_frees_its_replica():
    async def test(fleet, replicas):
        stream = await fleet.submit([PROMPT], [[SAMPLED]])
        with stream:
            await anext(stream)
        for _ in range(100):
            if not any(replica.engine.assembly.loop.has_work for replica in replicas):
                break
            await asyncio.sleep(0.02)
        for replica in replicas:
            assert not replica.engine.assembly.loop.has_work
        assert await fleet.drain(5)

    run(test)


def test_a_fleet_holds_so_many_and_no_more():
    async def test():
        fleet, _ = fleet_of(count=1, max_waiting=0)
        await fleet.start()
        room = fleet.assembly.config.max_num_seqs
        streams = [await fleet.submit([PROMPT], [[SAMPLED]]) for _ in range(room)]
        with pytest.raises(EngineBusyError, match=f"hold {room} of at most {room} requests"):
            await fleet.submit([PROMPT], [[SAMPLED]])
        for stream in streams:
            stream.close()
        await fleet.shutdown()
        with pytest.raises(EngineDrainingError):
            await fleet.submit([PROMPT], [[SAMPLED]])

    asyncio.run(asyncio.wait_for(test(), 60))


def test_prompts_with_a_common_prefix_meet_on_one_replica():
    async def test(fleet, replicas):
        for tail in range(4):
            await read(await fleet.submit([[*PROMPT, 60 + tail]], [[SAMPLED]]))
        hits = [replica.engine.assembly.loop.status().prefix.hits for replica in replicas]
        assert sorted(hits) == [0, 3]
        assert (await fleet.refresh()).loop.prefix.hits == 3

    run(test)


def test_affinity_yields_to_load_and_forgets_the_dead():
    affinity = PrefixAffinity(PAGE, slack=2, max_blocks=4)
    first = affinity.choose(PROMPT, {0: 1, 1: 0})
    assert first == 1, "the least busy one"
    assert affinity.choose(PROMPT, {0: 0, 1: 2}) == 1, "it has the prefix and is not much busier"
    assert affinity.choose(PROMPT, {0: 0, 1: 3}) == 0, "now it is"
    assert affinity.choose(PROMPT, {0: 1, 1: 0}) == 0, "and the other has the prefix too"
    assert affinity.choose(PROMPT, {1: 5}) == 1, "the owner is down"
    affinity.forget(1)
    assert affinity.choose(PROMPT, {0: 0, 1: 0}) == 0
    affinity.choose([9] * 64, {0: 1, 1: 0})
    assert len(affinity._owners) == 4


def emission(tokens, text, reason=None):
    origins = tuple(False for _ in tokens)
    return Emission("r", tuple(tokens), 0, text, reason, AcceptanceStatistics(5), origins=origins)


def test_progress_skips_what_was_told_token_by_token():
    told = SampleProgress()
    told.take(emission([1, 2, 3], "ab"))
    told.begin_again()
    assert told.take(emission([1], "a")) is None
    rest = told.take(emission([2, 3, 4], "bcd"))
    assert (rest.token_ids, rest.text) == ((4,), "cd")
    last = told.take(emission([], "", "stop"))
    assert last.finish_reason == "stop"
    assert told.is_finished


def test_replicas_that_disagree_are_found_out():
    told = SampleProgress()
    told.take(emission([1, 2, 3], "abc"))
    told.begin_again()
    with pytest.raises(DisagreementError, match="tokens 0 to 1"):
        told.take(emission([1, 9], "a?"))


def test_a_sample_that_had_ended_ends_once():
    """Its neighbour goes on elsewhere, where both are run again."""

    async def test(fleet, replicas):
        replicas[0].dies_after = 8
        params = [replace(SAMPLED, max_tokens=2), SAMPLED]
        found = await read(await fleet.submit([PROMPT], [params]))
        assert replicas[0].is_dead
        assert [sum(each.finish_reason is not None for each in found[number]) for number in range(2)] == [1, 1]
        assert [outcome_of(found[number]) for number in range(2)] == [alone(own) for own in params]

    run(test)


class SilentReplica:
    """Takes every call and never says so."""

    def __init__(self, replica):
        self.replica, self.num_calls = replica, 0

    async def emissions(self, call):
        self.num_calls += 1
        try:
            await asyncio.Event().wait()
            yield []
        finally:
            self.num_calls -= 1

    async def status(self):
        return await self.replica.status()

    async def shutdown(self):
        await self.replica.shutdown()


@pytest.mark.parametrize("end", ["shutdown", "drain", "cancel"])
def test_submissions_that_no_replica_has_taken_end_with_the_fleet(end):
    """A caller that nobody cancelled must not see a cancellation: it is told that the engine shuts down."""

    async def test():
        _, replicas = fleet_of()
        silent = [SilentReplica(replica) for replica in replicas]
        fleet = Fleet(replicas[0].engine.assembly, silent)
        await fleet.start()
        asking = asyncio.create_task(fleet.submit([PROMPT, PROMPT], [[SAMPLED], [SAMPLED]]))
        await asyncio.sleep(0.01)
        if end == "cancel":
            asking.cancel()
        else:
            await (fleet.shutdown() if end == "shutdown" else fleet.drain(0.01))
        with pytest.raises(asyncio.CancelledError if end == "cancel" else EngineDrainingError):
            await asking
        assert await fleet.drain(5)
        await asyncio.sleep(0)
        assert [each.num_calls for each in silent] == [0, 0]
        assert fleet.status().num_requests == 0
        await fleet.shutdown()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_reader_that_leaves_during_a_failover_frees_everything():
    async def test(fleet, replicas):
        replicas[0].dies_after = 3
        stream = await fleet.submit([PROMPT], [[SAMPLED]])
        with stream:
            while not replicas[0].is_dead:
                await anext(stream)
        assert await fleet.drain(5)
        assert fleet.status().num_requests == 0

    run(test)


@pytest.mark.parametrize("answer", [None, "ready", ValueError("what?"), ConfigError("no"), TimeoutError()])
def test_a_replica_that_answers_nonsense_is_down_and_the_others_are_watched(answer, monkeypatch):
    async def nonsense():
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def test(fleet, replicas):
        monkeypatch.setattr(replicas[0], "status", nonsense)
        status = await fleet.refresh()
        assert status.state == "degraded"
        assert "replica 0" in status.reason
        assert outcome_of((await read(await fleet.submit([PROMPT], [[SAMPLED]])))[0]) == alone(SAMPLED)
        replicas[1].is_dead = True
        while (await fleet.refresh()).state != "dead":
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        while (await fleet.refresh()).state != "degraded":
            await asyncio.sleep(0.01)
        assert not fleet._watch._poller.done()

    run(test)


def test_an_engine_that_drains_passes_its_requests_on():
    async def test(fleet, replicas):
        stream = await fleet.submit([PROMPT], [[SAMPLED]])
        await replicas[0].engine.drain(0.0)
        await replicas[1].engine.refresh()
        assert outcome_of((await read(stream))[0]) == alone(SAMPLED)
        assert (await fleet.refresh()).state == "degraded"
        assert outcome_of((await read(await fleet.submit([PROMPT], [[SAMPLED]])))[0]) == alone(SAMPLED)

    run(test)


def test_the_summary_adds_every_count():
    """Whatever numbers an engine tells: no field may be forgotten, or taken for a number."""

    def filled(start):
        numbers = count(start)
        flat = {item.name: next(numbers) for item in fields(LoopStatus) if item.type is int}
        nested = {
            name: kind(**{item.name: next(numbers) for item in fields(kind)})
            for name, kind in (("prefix", PrefixStatistics), ("draft_health", HealthCounts))
        }
        rounds = AcceptanceStatistics(5)
        rounds.record(5, 2)
        return LoopStatus(**flat, **nested, speculation="running", acceptance=rounds)

    loops = [filled(1), filled(100)]
    known = {number: EngineStatus("ready", None, 0, loop) for number, loop in enumerate(loops)}
    found = asdict(summary_of(known, {}, False, 0).loop)
    for name, value in asdict(loops[0]).items():
        other = asdict(loops[1])[name]
        if name == "speculation":
            assert found[name] == "running"
        elif name == "memory":
            assert found[name] is None, "each replica has its own"
        elif name == "acceptance":
            assert found[name]["accepted"] == [2, 2, 0, 0, 0]
        elif isinstance(value, dict):
            assert found[name] == {key: value[key] + other[key] for key in value}
        else:
            assert found[name] == value + other
