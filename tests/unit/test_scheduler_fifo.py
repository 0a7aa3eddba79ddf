"""The plan of a step: never more rows than allowed, never a negative number, first come first served."""

import random

import pytest

from dspark.config.errors import ConfigError
from dspark.scheduler.fifo import FifoScheduler
from dspark.scheduler.plan import PlannedSpan, RequestNeeds, StepPlan

PAGE = 8


def scheduler(max_num_seqs=4, rows=16, pages=20):
    return FifoScheduler(max_num_seqs, rows, pages, PAGE)


def needs(request_id, pending=1, verify_len=0, max_len=PAGE):
    return RequestNeeds(request_id, pending, verify_len, max_len)


def test_requests_start_in_the_order_of_their_arrival():
    queue = scheduler(max_num_seqs=2)
    for name in "abc":
        queue.add(needs(name))
    assert queue.admit() == ["a", "b"]
    assert queue.admit() == []
    queue.finish("a")
    assert queue.admit() == ["c"]
    assert queue.running == ("b", "c")


def test_a_small_request_does_not_overtake_one_that_waits_for_pages():
    queue = scheduler(pages=10)
    for name, length in (("a", 6 * PAGE), ("b", 7 * PAGE), ("c", PAGE)):
        queue.add(needs(name, max_len=length))
    assert queue.admit() == ["a"]
    queue.finish("a")
    assert queue.admit() == ["b", "c"]


def test_pages_are_counted_whole():
    queue = scheduler(pages=2)
    queue.add(needs("a", max_len=PAGE + 1))
    queue.add(needs("b", max_len=1))
    assert queue.admit() == ["a"]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    queue = scheduler(pages=2)
    with pytest.raises(ConfigError, match="up to 17 tokens needs 3 pages and the engine has 2"):
        queue.add(needs("a", max_len=2 * PAGE + 1))
    assert queue.admit() == []


def test_a_waiting_request_can_be_withdrawn():
    queue = scheduler(max_num_seqs=1)
    for name in "abc":
        queue.add(needs(name))
    queue.admit()
    queue.finish("b")
    queue.finish("never there")
    queue.finish("a")
    assert queue.admit() == ["c"]


def test_decoding_goes_before_prefill_and_prefill_takes_what_is_left():
    queue = scheduler(rows=16)
    state = {"long": needs("long", 30), "decoding": needs("decoding", 1, 5), "short": needs("short", 3)}
    for request in state.values():
        queue.add(request)
    queue.admit()
    assert queue.plan(state.__getitem__).spans == (
        PlannedSpan("decoding", 1, 5),
        PlannedSpan("long", 10, 0),
    )


def test_drafts_that_do_not_fit_are_left_out():
    queue = scheduler(rows=4)
    state = {name: needs(name, 1, 5) for name in "ab"}
    for request in state.values():
        queue.add(request)
    queue.admit()
    plan = queue.plan(state.__getitem__)
    assert plan.num_rows == 4
    assert plan.spans == (PlannedSpan("a", 1, 3),)


def test_no_requests_give_an_empty_plan():
    assert scheduler().plan({}.__getitem__) == StepPlan(())


def test_any_mix_keeps_the_rules():
    rng = random.Random(0)
    for _ in range(300):
        rows, count = rng.randint(1, 40), rng.randint(1, 6)
        queue = scheduler(max_num_seqs=6, rows=rows, pages=100)
        state = {}
        for name in range(count):
            state[name] = needs(name, rng.choice([1, 1, 2, 9, 50]), 0, 3 * PAGE)
            if state[name].num_pending == 1:
                state[name] = needs(name, 1, rng.randint(0, 5), 3 * PAGE)
            queue.add(state[name])
        queue.admit()
        plan = queue.plan(state.__getitem__)
        assert 1 <= plan.num_rows <= rows
        assert len({span.request_id for span in plan.spans}) == len(plan.spans)
        for span in plan.spans:
            request = state[span.request_id]
            assert 1 <= span.num_known <= request.num_pending
            assert 0 <= span.verify_len <= request.verify_len
            assert span.verify_len == 0 or span.num_known == request.num_pending


def test_work_is_always_finished():
    """With fewer rows a step than requests that run, every one still comes to its end."""
    queue = scheduler(max_num_seqs=5, rows=2, pages=100)
    pending, left = {}, {}
    for name in range(5):
        pending[name], left[name] = 7, 3
        queue.add(needs(name, 7, 0, 20))
    for _ in range(200):
        queue.admit()
        for span in queue.plan(lambda name: needs(name, pending[name], 0, 20)).spans:
            pending[span.request_id] -= span.num_known
            if pending[span.request_id] == 0:
                left[span.request_id] -= 1
                pending[span.request_id] = 1
            if left[span.request_id] == 0:
                queue.finish(span.request_id)
        if not queue.running:
            return
    raise AssertionError("some requests never ended")
