"""AsyncEngine over a loop of straw: every stream ends with its text or an error, whatever happens to the others."""

import asyncio
import contextlib
import threading
import time
import traceback

import pytest

from dspark import SamplingParams
from dspark.config.errors import ConfigError, DSparkError
from dspark.engine.async_engine import AsyncEngine, EngineBusyError, EngineDrainingError
from dspark.engine.loop_thread import EngineDeadError
from support.fake_loop import FakeLoop, failing_at, fake_assembly, sleeping

PARAMS = SamplingParams(max_tokens=256)
TEXT = "the quick brown fox"


def run(work, loop=None, **settings):
    """Run an async function with a started engine; the engine must be idle at its end."""
    loop = loop or FakeLoop()

    async def main():
        async with AsyncEngine.over(fake_assembly(loop), **settings) as engine:
            result = await work(engine)
            if engine.status().state != "dead":
                assert (await engine.refresh()).num_requests == 0
                assert not loop.requests
            return result

    return asyncio.run(main())


async def text_of(engine, prompt="a", params=PARAMS, **settings):
    return "".join([emission.text async for emission in engine.generate(prompt, params, **settings)])


async def read_all(stream):
    return [emission async for _, emission in stream]


def test_a_stream_yields_all_emissions_in_order():
    async def work(engine):
        emissions = [emission async for emission in engine.generate("a", PARAMS)]
        assert [len(emission.token_ids) for emission in emissions] == [1, 4, 4, 4, 4, 2]
        assert emissions[-1].finish_reason == "length"
        return "".join(emission.text for emission in emissions)

    assert run(work) == TEXT


def test_many_streams_each_get_their_own_text():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: bytes(prompt_ids).decode() * 3)

    async def work(engine):
        prompts = [f"prompt {number}; " for number in range(64)]
        assert await asyncio.gather(*(text_of(engine, prompt) for prompt in prompts)) == [p * 3 for p in prompts]

    run(work, loop)


def test_samples_are_told_apart():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: f"seed {seed}")

    async def work(engine):
        texts = ["", "", ""]
        async for index, emission in engine.generate_samples("a", [SamplingParams(seed=seed) for seed in (7, 8, 9)]):
            texts[index] += emission.text
        assert texts == ["seed 7", "seed 8", "seed 9"]

    run(work, loop)


def test_a_refused_prompt_takes_those_before_it_out_again():
    loop = FakeLoop(before_step=sleeping(0.001))

    async def work(engine):
        with pytest.raises(ConfigError, match="empty"):
            await engine.submit([[1], [2], []], [[PARAMS], [PARAMS, PARAMS], [PARAMS]])
        return await text_of(engine)

    assert run(work, loop) == TEXT
    assert len(loop.aborted) >= 3


def test_a_refusal_is_raised_at_the_first_step_of_the_iterator():
    async def work(engine):
        with pytest.raises(ConfigError, match="context holds"):
            await anext(engine.generate([1] * 5000, PARAMS))

    run(work)


def test_leaving_an_iterator_aborts_the_request_and_changes_no_other():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=sleeping(0.002))

    async def work(engine):
        other = asyncio.ensure_future(text_of(engine, "b"))
        async for _ in engine.generate("a", PARAMS, request_id="left"):
            break
        await asyncio.sleep(0.02)
        assert "left" in loop.aborted
        assert "left" not in loop.requests
        assert await other == (TEXT * 10)[:256]

    run(work, loop)


def test_cancelling_a_reader_aborts_its_request():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=sleeping(0.005))

    async def work(engine):
        readers = [asyncio.ensure_future(text_of(engine, "a", request_id=f"r{number}")) for number in range(8)]
        await asyncio.sleep(0.03)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await engine.refresh()
        assert not loop.requests

    run(work, loop)


def test_an_abort_storm_leaves_nothing_behind():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=sleeping(0.0005))

    async def one(engine, number):
        try:
            async with asyncio.timeout(0.001 * (number % 23)):
                return await text_of(engine, f"{number}")
        except TimeoutError:
            return None

    async def work(engine):
        survivor = asyncio.ensure_future(text_of(engine, "s"))
        await asyncio.gather(*(one(engine, number) for number in range(300)))
        assert await survivor == (TEXT * 10)[:256]
        await engine.refresh()
        assert not loop.requests

    run(work, loop)


def test_an_explicit_abort_ends_the_stream_without_an_error():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=sleeping(0.002))

    async def work(engine):
        reader = asyncio.ensure_future(text_of(engine, "a", request_id="gone"))
        await asyncio.sleep(0.01)
        assert await engine.abort("gone")
        assert not await engine.abort("gone")
        assert TEXT.startswith((await reader)[:3])

    run(work, loop)


def test_a_running_id_is_refused():
    loop = FakeLoop(before_step=sleeping(0.005))

    async def work(engine):
        first = asyncio.ensure_future(text_of(engine, request_id="same"))
        await asyncio.sleep(0.005)
        with pytest.raises(DSparkError, match="'same' is running already"):
            await text_of(engine, request_id="same")
        assert await first == TEXT

    run(work, loop)


def test_no_more_requests_wait_than_may():
    loop = FakeLoop(before_step=sleeping(0.005), max_num_seqs=2)

    async def work(engine):
        readers = [asyncio.ensure_future(text_of(engine)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        with pytest.raises(EngineBusyError, match="5 of at most 5"):
            await text_of(engine)
        with pytest.raises(DSparkError, match="6 samples were asked for at once"):
            await engine.submit(["a"], [[PARAMS] * 6])
        assert await asyncio.gather(*readers) == [TEXT] * 5
        assert await text_of(engine) == TEXT

    run(work, loop, max_waiting=3)


def test_a_failed_step_ends_every_stream_and_refuses_what_comes():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=failing_at(4), max_num_seqs=2)

    async def work(engine):
        results = await asyncio.gather(*(text_of(engine, "a") for _ in range(6)), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await text_of(engine)
        status = engine.status()
        assert (status.state, status.num_requests) == ("dead", 0)
        assert "the device is gone" in status.reason
        assert (await engine.refresh()).state == "dead"

    run(work, loop)


def test_a_command_that_fails_is_its_callers_alone():
    class Broken(FakeLoop):
        def add_samples(self, request_ids, prompt_ids, params, *, priority=0):
            if prompt_ids == [7]:
                raise KeyError("a fault nobody foresaw")
            super().add_samples(request_ids, prompt_ids, params, priority=priority)

    async def work(engine):
        with pytest.raises(KeyError):
            await text_of(engine, [7])
        assert await text_of(engine) == TEXT

    run(work, Broken())


def test_draining_finishes_what_runs_and_refuses_what_comes():
    loop = FakeLoop(before_step=sleeping(0.005))

    async def work(engine):
        reader = asyncio.ensure_future(text_of(engine))
        await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(engine.drain(10))
        await asyncio.sleep(0)
        assert engine.status().state == "draining"
        with pytest.raises(EngineDrainingError):
            await text_of(engine)
        assert await draining
        assert await reader == TEXT

    run(work, loop)


def test_draining_ends_what_runs_too_long():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=sleeping(0.05))

    async def work(engine):
        reader = asyncio.ensure_future(text_of(engine))
        await asyncio.sleep(0.02)
        assert not await engine.drain(0.05)
        with pytest.raises(EngineDrainingError, match=r"after 0\.05 s"):
            await reader

    run(work, loop)


def test_shutting_down_ends_the_streams_and_the_thread():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=sleeping(0.01))

    async def main():
        engine = AsyncEngine.over(fake_assembly(loop))
        reader = asyncio.ensure_future(text_of(engine))
        await asyncio.sleep(0.03)
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineDrainingError):
            await reader
        with pytest.raises(EngineDrainingError):
            await text_of(engine)
        assert engine._thread.join(0)

    asyncio.run(main())


def test_an_engine_that_never_started_shuts_down():
    asyncio.run(AsyncEngine.over(fake_assembly()).shutdown())


def test_a_stream_ends_at_its_deadline():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10, before_step=sleeping(0.02))

    async def work(engine):
        deadline = asyncio.get_running_loop().time() + 0.05
        stream = await engine.submit(["a"], [[PARAMS]], deadline=deadline)
        with stream, pytest.raises(TimeoutError):
            await read_all(stream)
        await engine.refresh()
        assert not loop.requests

    run(work, loop)


def test_a_reader_that_stops_reading_delays_nobody():
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: TEXT * 10)

    async def work(engine):
        with await engine.submit(["slow"], [[PARAMS]]) as slow:
            began = time.monotonic()
            assert await text_of(engine) == (TEXT * 10)[:256]
            assert time.monotonic() - began < 5
            text = "".join([emission.text async for _, emission in slow])
        assert text == (TEXT * 10)[:256]

    run(work, loop)


def test_a_draft_that_stopped_degrades_and_says_why():
    loop = FakeLoop()

    async def work(engine):
        assert engine.status().state == "ready"
        loop.engine.speculation_status = "not running because the accepted length fell to 1.02"
        status = await engine.refresh()
        assert status.state == "degraded"
        assert status.reason == "speculation is not running because the accepted length fell to 1.02"

    run(work, loop)


def test_plain_decoding_on_purpose_is_not_degraded():
    loop = FakeLoop()
    loop.engine.speculation_status = "not running because it is switched off"
    assert run(lambda engine: engine.refresh(), loop).state == "ready"


def test_another_event_loop_is_refused():
    engine = AsyncEngine.over(fake_assembly())
    asyncio.run(engine.start())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(engine.start())
    engine._thread.stop()


def test_an_id_that_is_free_again_brings_no_tokens_of_its_last_holder():
    """Emissions that were on their way when a reader left must not reach the next request of that name."""
    loop = FakeLoop(reply_to=lambda prompt_ids, seed: chr(prompt_ids[0]) * 200, before_step=sleeping(0.001))

    async def work(engine):
        for _ in range(20):
            with await engine.submit([[65]], [[PARAMS]], request_id="name") as stream:
                await anext(stream)
                time.sleep(0.004)  # steps go on while this event loop does not
            assert await text_of(engine, [66], SamplingParams(max_tokens=8), request_id="name") == "B" * 8

    run(work, loop)


def test_aborting_twice_and_aborting_what_is_not_there():
    async def work(engine):
        stream = await engine.submit([[65]], [[PARAMS]], request_id="name")
        assert await asyncio.gather(engine.abort("name"), engine.abort("name")) == [True, False]
        assert not await engine.abort("never")
        assert len(await read_all(stream)) <= 1

    run(work, FakeLoop(before_step=sleeping(0.05)))


def test_closing_an_iterator_has_aborted_its_request_when_it_returns():
    async def work(engine):
        iterator = engine.generate("a", PARAMS)
        await anext(iterator)
        await iterator.aclose()
        assert engine.status().num_requests == 0
        never = engine.generate("a", PARAMS)
        await never.aclose()
        await engine.refresh()

    run(work, FakeLoop(before_step=sleeping(0.01)))


def test_a_dead_engine_that_is_asked_again_and_again_keeps_nothing():
    """One error object that is raised anew keeps every frame that it went through."""

    async def main():
        async with AsyncEngine.over(fake_assembly(FakeLoop(before_step=failing_at(1)))) as engine:
            with pytest.raises(EngineDeadError):
                await text_of(engine)
            for _ in range(50):
                await engine.refresh()
                with pytest.raises(EngineDeadError):
                    await text_of(engine)
            for error in (engine._error, engine._thread._ended):
                assert len(traceback.extract_tb(error.__traceback__)) < 10

    asyncio.run(main())


def test_an_engine_that_was_shut_down_first_starts_no_thread():
    async def main():
        engine = AsyncEngine.over(fake_assembly(FakeLoop()))
        await engine.shutdown()
        with pytest.raises(EngineDrainingError):
            await text_of(engine)
        assert (await engine.refresh()).state == "draining"
        assert "dspark-engine" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(main())


@pytest.mark.parametrize("delay", [0, 0.001, 0.02])
def test_a_cancelled_submission_leaves_nothing_behind(delay):
    async def work(engine):
        for _ in range(10):
            task = asyncio.create_task(engine.submit(["a"], [[PARAMS]]))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).close()

    run(work, FakeLoop(before_step=sleeping(0.005)))


@pytest.mark.parametrize("delay", [0, 0.001, 0.02])
def test_a_shutdown_during_submissions_ends_them_all(delay):
    async def main():
        engine = AsyncEngine.over(fake_assembly(FakeLoop(before_step=sleeping(0.005))))
        await engine.start()
        tasks = [asyncio.create_task(text_of(engine, "a" * 30_000 if n % 2 else "a")) for n in range(8)]
        await asyncio.sleep(delay)
        await engine.shutdown()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(each, str | EngineDrainingError | EngineDeadError | DSparkError) for each in results)

    asyncio.run(main())
