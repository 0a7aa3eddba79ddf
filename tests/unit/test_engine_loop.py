"""The serving loop: what is cached, shared, stopped and ended, in numbers. The law has its own test of the tokens."""

import pytest

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.engine.core import Speculation
from support.engines import run_out, tiny_loop
from support.loops import outcome_of
from support.tiny_models import BLOCK, MAX_LEN

PAGE = 8
PROMPT = [5 + number % 60 for number in range(37)]


def params(max_tokens=10, **changes):
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True} | changes))


def answer(loop, request_id, prompt=PROMPT, **changes):
    loop.add(request_id, prompt, params(**changes))
    return run_out(loop)[request_id]


def test_the_second_identical_prompt_reports_cached_tokens():
    """With speculation on: the draft's window is part of the image (S5, S6), so acceptance and tokens are the same."""
    loop = tiny_loop("v41")
    cold, warm = answer(loop, "cold", max_tokens=20), answer(loop, "warm", max_tokens=20)
    assert cold[0].num_cached_tokens == 0
    assert warm[0].num_cached_tokens == 32, "the last page boundary before the end of the prompt"
    assert outcome_of(warm) == outcome_of(cold)
    assert [emission.num_accepted for emission in warm] == [emission.num_accepted for emission in cold]
    assert loop.status().prefix.hits == 1


def test_the_next_turn_hits_up_to_a_stop_inside_an_accepted_block():
    """S10: every final row of the turn before is reused, wherever its output ended."""
    loop = tiny_loop("v41")
    stream = [token for emission in answer(loop, "whole", max_tokens=24) for token in emission.token_ids]
    for stop in range(1, 20):
        loop.clear_cache()
        ended = answer(loop, "turn", max_tokens=24, stop_token_ids=(stream[stop],))
        output = [token for emission in ended for token in emission.token_ids]
        history = [*PROMPT, *output, 9, 9, 9]
        next_turn = answer(loop, "next", prompt=history, max_tokens=2)
        assert next_turn[0].num_cached_tokens >= len(PROMPT) + len(output) - 1


def test_prompts_that_part_late_share_what_they_have_in_common():
    """The second leaves an image where it parts from the first; the third starts from it."""
    loop = tiny_loop("v41", interval_pages=8)
    found = [
        answer(loop, name, prompt=[*PROMPT[:30], *tail * 8])[0].num_cached_tokens
        for name, tail in (("a", [70]), ("b", [71]), ("c", [69]))
    ]
    assert found == [0, 0, 24]


def test_long_prompts_leave_images_on_the_way():
    loop = tiny_loop("v41", interval_pages=2, max_rows=64)
    answer(loop, "a", prompt=[*PROMPT, *PROMPT], max_tokens=1)
    assert answer(loop, "b", prompt=[*PROMPT[:20], 70, 70], max_tokens=1)[0].num_cached_tokens == 16


def test_without_a_prefix_cache_nothing_is_reused_but_samples_share_their_prompt():
    loop = tiny_loop("v41", reuses_prefixes=False)
    answer(loop, "a")
    assert answer(loop, "b")[0].num_cached_tokens == 0
    loop.add_samples(["c", "d"], PROMPT, [params(), params(seed=3, temperature=1.0)])
    assert [run[0].num_cached_tokens for run in run_out(loop).values()] == [0, len(PROMPT) - 1]


def test_samples_compute_their_prompt_once():
    loop = tiny_loop("v41", speculation=Speculation())
    names = ["a", "b", "c"]
    loop.add_samples(names, PROMPT, [params(max_tokens=1, temperature=1.0, seed=seed) for seed in range(3)])
    run_out(loop)
    assert loop.engine.statistics.rounds == 0, "a first token is no round"
    assert loop.status().prefix.cached_tokens == 2 * (len(PROMPT) - 1)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_if_the_first_sample_is_aborted_another_takes_its_place(when):
    loop = tiny_loop("v41", max_rows=8)
    loop.add_samples(["a", "b", "c"], PROMPT, [params()] * 3)
    for _ in range(when):
        loop.step()
    loop.abort("a")
    emissions = run_out(loop)
    assert outcome_of(emissions["b"]) == outcome_of(emissions["c"])
    assert len(outcome_of(emissions["b"]).token_ids) == 10


def test_a_refused_sample_takes_the_others_with_it():
    loop = tiny_loop("v41", num_pages=8)
    with pytest.raises(ConfigError, match="needs 9 pages and the engine has 8"):
        loop.add_samples(["a", "b"], PROMPT, [params(), params(max_tokens=30)])
    assert not loop.has_work
    loop.check_integrity()
    with pytest.raises(ConfigError, match="is running already"):
        loop.add_samples(["a", "a"], PROMPT, [params()] * 2)
    assert not loop.has_work


def test_requests_that_outgrow_the_pool_are_replayed_and_all_end():
    """Six requests of up to 7 pages over 12: they run four at a time at first and stop each other later."""
    loop = tiny_loop("v41", num_pages=12)
    for number in range(6):
        loop.add(number, PROMPT[: 9 + number], params(max_tokens=40))
    emissions = run_out(loop)
    assert loop.status().num_preemptions > 0
    alone = tiny_loop("v41", num_slots=1, speculation=Speculation(), reuses_prefixes=False)
    for number in range(6):
        assert outcome_of(emissions[number]) == outcome_of(
            answer(alone, number, prompt=PROMPT[: 9 + number], max_tokens=40)
        )


def test_a_request_preempted_after_every_step_still_ends():
    """S7: only final tokens are replayed, so a request that is stopped again and again moves on."""
    loop = tiny_loop("v41")
    expected = outcome_of(answer(loop, "calm", max_tokens=12))
    loop.add("stopped", PROMPT, params(max_tokens=12))
    emissions = []
    while loop.has_work:
        emissions += loop.step()
        if loop.scheduler.running:
            loop.preempt("stopped")
        loop.check_integrity()
    assert outcome_of(emissions) == expected
    assert emissions[0].num_cached_tokens == 32, "replays from its own images are no cache hits of the user's"


def test_cached_prefixes_give_way_to_requests():
    loop = tiny_loop("v41", num_pages=12)
    for number in range(8):
        answer(loop, number, prompt=[number + 10, *PROMPT], max_tokens=40)
    status = loop.status()
    assert status.prefix.evictions > 0
    assert status.num_free_pages + status.num_cached_pages == 12


def test_images_stay_within_their_memory():
    size = tiny_loop("v41")
    answer(size, "a")
    one = size.status().prefix.image_bytes // size.status().prefix.images
    loop = tiny_loop("v41", image_bytes=3 * one)
    for number in range(6):
        answer(loop, number, prompt=[number + 10, *PROMPT])
        assert loop.status().prefix.image_bytes <= 3 * one
    none = tiny_loop("v41", image_bytes=1)
    answer(none, "a")
    assert none.status().prefix.images == 0
    assert answer(none, "b")[0].num_cached_tokens == 0


def test_a_request_with_prompt_logprobs_computes_every_row():
    loop = tiny_loop("v41")
    answer(loop, "a")
    assert answer(loop, "b", prompt_logprobs=0)[0].num_cached_tokens == 0


def test_priority_decides_who_is_admitted_first():
    loop = tiny_loop("v41", num_slots=1)
    for name, priority in (("late", 1), ("soon", 0), ("now", -1)):
        loop.add(name, PROMPT, params(max_tokens=2), priority=priority)
    assert list(run_out(loop)) == ["now", "soon", "late"]


def test_status_counts_what_happened():
    loop = tiny_loop("v41")
    loop.add("a", PROMPT, params())
    loop.add("b", PROMPT, params())
    before = loop.status()
    assert (before.num_running, before.num_waiting, before.num_steps) == (0, 2, 0)
    loop.step()
    during = loop.status()
    assert (during.num_running, during.num_waiting, during.num_steps) == (2, 0, 1)
    assert during.last_step_rows == 32, "both prompts stop at the first position that wants an image"
    assert 0 < during.page_usage < 1
    run_out(loop)
    after = loop.status()
    assert after.page_usage == 0.0
    assert after.acceptance.rounds > 0
    assert after.acceptance.block_size == BLOCK
    assert after.to_dict()["prefix"]["lookups"] == 2
    assert loop.max_model_len == MAX_LEN


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 31])
@pytest.mark.parametrize("max_rows", [1, 64])
def test_prompts_that_end_at_or_beside_a_page_or_an_image(length, max_rows):
    """Cold, again, as samples, and preempted, in the smallest pool that admits the request."""
    shape = params(6, temperature=1.0, seed=length)
    expected = outcome_of(answer(tiny_loop("v41", num_slots=1), "alone", PROMPT[:length], **vars(shape)))
    loop = tiny_loop("v41", num_slots=3, num_pages=-(-(length + 6) // PAGE), max_rows=max_rows)
    for name in ("cold", "warm"):
        assert outcome_of(answer(loop, name, PROMPT[:length], **vars(shape))) == expected
    loop.add_samples(["a", "b", "c"], PROMPT[:length], [shape] * 3)
    first = loop.step()
    if loop.scheduler.running:
        loop.preempt(loop.scheduler.running[0])
    found = run_out(loop)
    for emission in first:
        found[emission.request_id].insert(0, emission)
    assert [outcome_of(found[name]) for name in "abc"] == [expected] * 3


def test_prompts_that_agree_in_their_last_tokens_only_share_nothing():
    """The tokens after the last whole page name a prefix together with all that is before them."""
    loop = tiny_loop("v41")
    tail = PROMPT[:5]
    for number, head in enumerate(([9] * 16, [9] * 15 + [8], [8] + [9] * 15, [9] * 8, [])):
        found = answer(loop, number, [*head, *tail])
        assert found[0].num_cached_tokens in ((0,) if number != 3 else (0, 8))
        assert outcome_of(found) == outcome_of(answer(tiny_loop("v41"), "alone", [*head, *tail]))


def test_prompt_logprobs_of_samples_survive_preemption():
    shape = params(4, prompt_logprobs=1, logprobs=1)
    expected = outcome_of(answer(tiny_loop("v41"), "alone", PROMPT, **vars(shape)))
    loop = tiny_loop("v41", num_slots=2, num_pages=7, max_rows=9)
    loop.add("first", PROMPT, params())
    loop.add_samples(["a", "b"], PROMPT, [shape] * 2)
    seen = {}
    for number in range(200):
        if not loop.has_work:
            break
        running = [name for name in loop.scheduler.running if name != "first"]
        if running and number % 3 == 2:
            loop.preempt(running[-1])
        for emission in loop.step():
            seen.setdefault(emission.request_id, []).append(emission)
        loop.check_integrity()
    assert [outcome_of(seen[name]) for name in "ab"] == [expected] * 2


def test_the_first_in_precedence_ends_while_better_ones_keep_coming():
    """A flood of the same priority starves nobody: precedence is by arrival."""
    loop = tiny_loop("v41", num_slots=2, num_pages=8, max_rows=12)
    loop.add("early", PROMPT, params())
    ended = []
    for number in range(60):
        loop.add(number, PROMPT[: 1 + number % 20], params(2))
        ended += [emission.request_id for emission in loop.step() if emission.finish_reason]
        if "early" in ended:
            break
    assert "early" in ended


def test_no_sample_at_all_is_refused():
    loop = tiny_loop("v41")
    with pytest.raises(ConfigError, match="no sample"):
        loop.add_samples([], PROMPT, [])
    assert not loop.has_work
    loop.check_integrity()
