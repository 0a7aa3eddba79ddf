"""What the state refuses, where its rows lie, and that pages are never lost."""

import random

import pytest
import torch

from dspark.config.errors import ConfigError, DSparkError
from dspark.state.geometry import RingPlan, require_ring_rows, ring_rows, state_geometry
from dspark.state.pages import OutOfPagesError, PageAllocator
from dspark.state.spans import RowMap, Span
from dspark.state.views import DraftView, PassView
from support.row_reference import prefilled, row_reference, write_rows
from support.tiny_models import BLOCK, WINDOW, tiny_model, tiny_state

KEY = ("v41", False, torch.float32)


@pytest.fixture
def state():
    return tiny_state(tiny_model(*KEY), num_slots=3, num_pages=6)


@pytest.fixture
def tentative(state):
    """A request with 5 committed rows and 3 that are not."""
    reference, model = row_reference(KEY), tiny_model(*KEY)
    request = prefilled(model, state, reference.tokens[:5])
    write_rows(model, state, [(request, reference.tokens[:8])])
    return request


def test_ring_rows_of_the_released_sizes():
    """A window of 128 and 1 + 5 rows of a verify pass need 133 rows."""
    assert ring_rows(RingPlan("layers.0", 128, 512), 6) == 133
    require_ring_rows(RingPlan("layers.0", 128, 512), 133, 6)
    with pytest.raises(ConfigError, match=r"132 ring rows.*reach of 128, 6 tentative rows and a rewind of 0 need 133"):
        require_ring_rows(RingPlan("layers.0", 128, 512), 132, 6)


def test_a_ring_that_a_verify_would_corrupt_is_refused():
    with pytest.raises(ConfigError, match=r"12 ring rows, .* 8, 6 tentative rows and a rewind of 0 need 13"):
        tiny_state(tiny_model(*KEY), num_ring_rows=WINDOW + BLOCK - 1)
    tiny_state(tiny_model(*KEY), num_ring_rows=WINDOW + BLOCK)


def test_every_store_of_a_model():
    """One window ring for each layer and stage; growing rows and tails at source layers only."""
    v41 = state_geometry(tiny_model("v41").plan)
    assert [ring.key for ring in v41.windows] == [*(f"layers.{i}" for i in range(6)), "mtp.0", "mtp.1"]
    assert {(store.key, store.ratio) for store in v41.appends} == {
        ("layers.1.compressed", 2), ("layers.1.index", 2), ("layers.3.compressed", 1), ("layers.3.index", 1),
    }  # fmt: skip
    assert [(ring.key, ring.reach) for ring in v41.tails] == [("layers.1.compressed", 2)]
    v4 = state_geometry(tiny_model("v4").plan)
    assert {(ring.key, ring.reach) for ring in v4.tails} == {
        ("layers.1.compressed", 8), ("layers.1.index", 8), ("layers.2.compressed", 8),
        ("layers.3.compressed", 8), ("layers.3.index", 8),
    }  # fmt: skip


def test_tentative_rows_block_everything_but_a_commit(state, tentative):
    """A new pass, a draft pass, an image and a fork would all read rows that may not stay."""
    for action in (
        lambda: PassView(state, [Span(tentative, 5, 1)]),
        lambda: DraftView(state, [Span(tentative, 5, BLOCK)]),
        lambda: state.image(tentative),
        lambda: state.fork(tentative),
    ):
        with pytest.raises(AssertionError, match="3 tentative rows after position 5"):
            action()
    state.check_integrity()
    state.commit(tentative, 1)
    PassView(state, [Span(tentative, 6, 1)])


@pytest.mark.parametrize("num_rows", [-1, 0, 4])
def test_a_commit_keeps_one_row_at_least_and_no_more_than_were_written(state, tentative, num_rows):
    with pytest.raises(AssertionError, match="with 3 tentative"):
        state.commit(tentative, num_rows)
    assert (tentative.committed, tentative.tentative) == (5, 3)


def test_a_second_commit_of_the_same_pass_is_refused(state, tentative):
    state.commit(tentative, 2)
    with pytest.raises(AssertionError, match="with 0 tentative"):
        state.commit(tentative, 1)


def test_a_pass_starts_where_the_last_one_ended(state):
    request = state.open()
    with pytest.raises(AssertionError, match="starts at the committed position"):
        PassView(state, [Span(request, 1, 1)])


def test_a_request_may_end_with_tentative_rows(state, tentative):
    state.close(tentative)
    state.check_integrity()
    assert state.pages.num_free == 6


def test_more_requests_than_slots(state):
    for _ in range(3):
        state.open()
    with pytest.raises(ConfigError, match="all 3 slots are in use"):
        state.open()
    state.check_integrity()


def test_lost_slots_and_pages_are_noticed(state):
    request = prefilled(tiny_model(*KEY), state, row_reference(KEY).tokens[:20])
    state.check_integrity()
    state.requests.remove(request)
    with pytest.raises(AssertionError, match="slots are lost"):
        state.check_integrity()
    state.requests.append(request)
    request.pages.pop()
    with pytest.raises(AssertionError, match="page holders differ"):
        state.check_integrity()


def test_pages_are_conserved():
    """Any mix of takes, shares and releases: what is held is not free, what nobody holds is."""
    rng = random.Random(0)
    for _ in range(30):
        allocator, held = PageAllocator(5), []
        for _ in range(80):
            action = rng.choice(["take", "share", "release"])
            if action == "take" and len(set(held)) == 5:
                with pytest.raises(OutOfPagesError, match="all 5 pages are in use"):
                    allocator.take()
            elif action == "take":
                page = allocator.take()
                assert page not in held
                held.append(page)
            elif held and action == "share":
                held.append(allocator.share(rng.choice(held)))
            elif held:
                page = held.pop(rng.randrange(len(held)))
                allocator.release(page)
            allocator.check_integrity({page: held.count(page) for page in held})
            assert allocator.num_free == 5 - len(set(held))
            assert all(allocator.num_holders(page) == held.count(page) for page in held)


def test_pages_that_nobody_holds_cannot_be_shared_or_released():
    allocator = PageAllocator(2)
    for action in (allocator.share, allocator.release):
        with pytest.raises(AssertionError, match="not held"):
            action(0)


def test_out_of_pages_is_an_error_that_a_user_can_read():
    assert issubclass(OutOfPagesError, DSparkError)


def places_by_hand(spans, ring_rows_, owner, position):
    """Where a token lies in [rings of the spans, rows of the pass]: counted, not computed."""
    if position < 0:
        return -1
    span = spans[owner]
    if position < span.start:
        return owner * ring_rows_ + position % ring_rows_
    before = sum(other.num_rows for other in spans[:owner])
    return len(spans) * ring_rows_ + before + position - span.start


@pytest.mark.parametrize("ring", [WINDOW, 13, 133])
def test_row_arithmetic(state, ring):
    rng = random.Random(ring)
    for _ in range(20):
        starts = [rng.choice([0, 1, ring - 1, ring, ring + 1, 265, 2 * ring]) for _ in range(3)]
        spans = [Span(state.open(), start, rng.randint(1, 2 * ring)) for start in starts]
        rows = RowMap(spans, 2, torch.device("cpu"))
        asked = [
            (owner, span.start + offset) for owner, span in enumerate(spans) for offset in range(-ring, span.num_rows)
        ]
        owners, positions = (torch.tensor(column) for column in zip(*asked, strict=True))
        expected = [places_by_hand(spans, ring, *one) for one in asked]
        assert rows.locate(owners, positions, ring).tolist() == expected

        store = {}
        kept, places = rows.ring_writes(ring)
        assert len(set(places.tolist())) == len(places), "a place is written twice"
        for row, place in zip(kept.tolist(), places.tolist(), strict=True):
            store[place] = (int(rows.owners[row]), int(rows.positions[row]))
        for owner, span in enumerate(spans):
            for position in range(max(span.start, span.stop - ring), span.stop):
                assert store[span.request.slot * ring + position % ring] == (owner, position)
        assert rows.is_padding.tolist() == [False] * rows.num_rows + [True] * 2
        for span in spans:
            state.close(span.request)


def test_padding_rows_see_nothing(state):
    """The rows behind the real ones have no window and no compressed rows, whatever request stands first."""
    request = prefilled(tiny_model(*KEY), state, row_reference(KEY).tokens[:20])
    view = PassView(state, [Span(request, 20, 2)], num_padding=3)
    width = state.rings["layers.0"].shape[2]
    [(_, index)] = view.window_keys("layers.0", torch.zeros(5, width))
    assert (index[:2] >= 0).all() and (index[2:] == -1).all()
    assert view.visible(1).tolist() == [21, 22, 0, 0, 0]
    assert view.visible(2).tolist() == [10, 11, 0, 0, 0]
    assert view.groups("layers.3.compressed", 1, 1).positions.tolist() == [20, 21]
