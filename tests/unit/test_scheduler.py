"""Who runs, who waits and who stops: never more rows or pages than there are, never a dead end, nobody overtakes.

The model here is null: a request is a number of tokens, and a step gives it some. Speed is measured by `dspark bench
host`, not here.
"""

import random
from dataclasses import dataclass, field

import pytest

from dspark.config.errors import ConfigError
from dspark.scheduler.plan import PlannedSpan, RequestNeeds
from dspark.scheduler.scheduler import Place, Scheduler

PAGE = 8


@dataclass
class Pool:
    """Pages and requests without a model: what is needed of each request, and the supply."""

    num_pages: int
    needs: dict = field(default_factory=dict)

    @property
    def num_free(self):
        return self.num_pages - sum(need.num_pages for need in self.needs.values())

    def available_pages(self, wanted):
        return self.num_free

    def pages_to_start(self, request_id):
        return -(-self.needs[request_id].num_pending // PAGE)

    def pages_from(self, request_id):
        return self.needs[request_id].num_pages

    def add(self, request_id, pending=1, verify_len=0, max_len=PAGE, committed=0, num_pages=0, max_chunk=None):
        self.needs[request_id] = RequestNeeds(request_id, pending, verify_len, max_len, committed, num_pages, max_chunk)


def queue_of(pool, names, rows=16, slots=4, priorities=()):
    queue = Scheduler(slots, rows, pool.num_pages, PAGE)
    for number, name in enumerate(names):
        queue.add(name, Place(dict(priorities).get(name, 0), number))
    return queue


def start_all(queue, pool):
    started = []
    while (name := queue.next_to_start(pool.needs.__getitem__, pool)) is not None:
        started.append(name)
    return started


def planned(queue, pool):
    schedule = queue.plan(pool.needs.__getitem__, pool)
    return schedule.preempted, {span.request_id: (span.num_known, span.verify_len) for span in schedule.plan.spans}


def test_requests_start_in_the_order_of_their_arrival():
    pool = Pool(20)
    for name in "abc":
        pool.add(name)
    queue = queue_of(pool, "abc", slots=2)
    assert start_all(queue, pool) == ["a", "b"]
    queue.remove("a")
    assert start_all(queue, pool) == ["c"]
    assert queue.running == ("b", "c")


def test_the_lower_priority_value_goes_first():
    pool = Pool(20)
    for name in "abc":
        pool.add(name)
    assert start_all(queue_of(pool, "abc", priorities={"c": -1, "a": 5}.items()), pool) == ["c", "b", "a"]


def test_a_small_request_does_not_overtake_one_that_waits_for_pages():
    pool = Pool(10)
    pool.add("a", pending=6 * PAGE)
    pool.add("b", pending=5 * PAGE)
    pool.add("c")
    queue = queue_of(pool, "abc")
    assert start_all(queue, pool) == ["a"]
    assert queue.waiting == ("b", "c")


def test_an_admission_leaves_running_requests_what_they_need_next():
    """ "a" holds 2 pages and must still write 3, and may grow by one: of 8 pages 2 are left, and "b" wants 3."""
    pool = Pool(8)
    pool.add("a", pending=24, committed=16, num_pages=2)
    pool.add("b", pending=3 * PAGE)
    queue = queue_of(pool, "ab")
    assert start_all(queue, pool) == ["a"]
    pool.add("b", pending=2 * PAGE)
    assert start_all(queue, pool) == ["b"]


def test_the_first_request_starts_whatever_the_pool_says():
    """It fits alone, and nobody else holds anything that it could wait for."""
    pool = Pool(3)
    pool.add("a", pending=3 * PAGE)
    assert start_all(queue_of(pool, "a"), pool) == ["a"]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    queue = queue_of(Pool(2), "")
    queue.require_fit(2 * PAGE)
    with pytest.raises(ConfigError, match="up to 17 tokens needs 3 pages and the engine has 2"):
        queue.require_fit(2 * PAGE + 1)


def test_removed_requests_are_gone_wherever_they_stood():
    pool = Pool(20)
    for name in "abc":
        pool.add(name)
    queue = queue_of(pool, "abc", slots=1)
    start_all(queue, pool)
    for name in ("b", "a", "nobody"):
        queue.remove(name)
    assert (queue.running, queue.waiting) == ((), ("c",))


def test_decoding_comes_before_prefill_and_prefill_takes_what_is_left():
    pool = Pool(20)
    pool.add("long", pending=40)
    pool.add("a", verify_len=5)
    pool.add("b", verify_len=2)
    queue = queue_of(pool, ["long", "a", "b"])
    start_all(queue, pool)
    assert planned(queue, pool) == ((), {"long": (7, 0), "a": (1, 5), "b": (1, 2)})


def test_drafts_give_way_to_rows_that_are_not_there():
    pool = Pool(20)
    for name in "ab":
        pool.add(name, verify_len=5)
    queue = queue_of(pool, "ab", rows=8)
    start_all(queue, pool)
    assert planned(queue, pool)[1] == {"a": (1, 5), "b": (1, 1)}


def test_a_chunk_ends_where_an_image_is_wanted():
    pool = Pool(20)
    pool.add("a", pending=30, max_chunk=12, verify_len=3)
    queue = queue_of(pool, "a", rows=64)
    start_all(queue, pool)
    assert planned(queue, pool)[1] == {"a": (12, 0)}


def test_the_last_in_precedence_stop_when_pages_run_out_and_keep_their_place():
    """Three requests at a page boundary, one free page: the youngest stops, whose page serves the second."""
    pool = Pool(4)
    for name in "abc":
        pool.add(name, committed=PAGE, num_pages=1, max_len=2 * PAGE)
    queue = queue_of(pool, "abc")
    for _ in "abc":
        queue.next_to_start(pool.needs.__getitem__, Pool(100, pool.needs))
    assert planned(queue, pool) == (("c",), {"a": (1, 0), "b": (1, 0)})
    assert (queue.running, queue.waiting) == (("a", "b"), ("c",))


def test_the_first_in_precedence_is_never_stopped():
    pool = Pool(1)
    pool.add("a", committed=PAGE, num_pages=1)
    queue = queue_of(pool, "a")
    start_all(queue, pool)
    assert planned(queue, pool) == ((), {"a": (1, 0)})


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_within_rows_and_pages(seed):
    """Random lengths, drafts, priorities, aborts over a pool that holds little more than the longest request."""
    rng = random.Random(seed)
    pool = Pool(rng.randint(6, 14))
    queue = Scheduler(rng.randint(1, 5), rng.randint(1, 24), pool.num_pages, PAGE)
    lengths = {}
    for number in range(rng.randint(3, 12)):
        prompt = rng.randint(1, 30)
        lengths[number] = prompt + rng.randint(1, 15)
        queue.require_fit(lengths[number])
        pool.add(number, pending=prompt, max_len=lengths[number])
        queue.add(number, Place(rng.choice([0, 0, 1]), number))
    for _ in range(3000):
        if not lengths:
            return
        start_all(queue, pool)
        schedule = queue.plan(pool.needs.__getitem__, pool)
        for name in schedule.preempted:
            need = pool.needs[name]
            pool.add(name, need.committed + need.num_pending, max_len=need.max_len)
        spans = schedule.plan.spans
        assert 1 <= schedule.plan.num_rows <= queue.max_rows
        for span in spans:
            advance(pool, span, rng)
        assert pool.num_free >= 0, "more pages were planned than there are"
        for name in [name for name in lengths if finished(pool, name) or rng.random() < 0.002]:
            queue.remove(name)
            del pool.needs[name], lengths[name]
    raise AssertionError(f"{len(lengths)} requests starve")


def advance(pool: Pool, span: PlannedSpan, rng: random.Random) -> None:
    """Write a span's rows; some of its drafts are accepted."""
    need = pool.needs[span.request_id]
    assert 1 <= span.num_known <= need.num_pending
    written = -(-(need.committed + span.num_rows) // PAGE)
    is_last = span.num_known == need.num_pending
    assert is_last or span.verify_len == 0
    accepted = rng.randint(0, span.verify_len)
    pool.add(
        span.request_id,
        pending=1 if is_last else need.num_pending - span.num_known,
        verify_len=min(rng.randint(0, 5), max(need.max_len - need.committed - span.num_known - accepted - 2, 0)),
        max_len=need.max_len,
        committed=need.committed + span.num_known + accepted,
        num_pages=max(written, need.num_pages),
    )


def finished(pool: Pool, name: int) -> bool:
    need = pool.needs[name]
    return need.num_pending == 1 and need.committed + 1 >= need.max_len
