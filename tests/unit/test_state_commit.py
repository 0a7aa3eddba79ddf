"""A round that wrote n rows and kept k leaves the state as if only k rows had ever been written.

Every width, every kept prefix, at positions around multiples of the window and of the rings, for requests in any order
in slots that do not follow each other, with everything out of reach full of garbage.
"""

import random

import pytest
import torch

from dspark.state.geometry import ring_rows
from support.row_reference import draft_blocks, keep_rows, prefilled, row_reference, same, write_rows
from support.schedules import poison
from support.tiny_models import BLOCK, NUM_VALID, WINDOW, tiny_model, tiny_state

MODELS = {
    "v41": ("v41", False, torch.float32),
    "v4": ("v4", False, torch.float32),
    "v4 quantised bf16": ("v4", True, torch.bfloat16),
    "v41 quantised": ("v41", True, torch.float32),
}
RING = WINDOW - 1 + BLOCK + 1
STARTS = sorted(
    {0, 1, 2, 3, 5}
    | {multiple * rows + step for rows in (WINDOW, RING) for multiple in (1, 2) for step in (-1, 0, 1)}
    | {3 * RING, 47}
)
WIDTHS = range(1, BLOCK + 2)
PREFIXES = [(width, kept) for width in WIDTHS for kept in range(1, width + 1)]


@pytest.fixture(params=MODELS, ids=str)
def model_key(request):
    return MODELS[request.param]


def scattered_slots(state, rng):
    """Leave the free slots in an order without pattern."""
    opened = [state.open() for _ in range(state.num_slots)]
    rng.shuffle(opened)
    for request in opened:
        state.close(request)


def wrong(token):
    return 2 + (token + 7) % (NUM_VALID - 2)


@pytest.mark.parametrize("start", STARTS)
def test_every_kept_prefix_of_every_width(model_key, start):
    model, reference = tiny_model(*model_key), row_reference(model_key)
    rng = random.Random(start)
    state = tiny_state(model, num_slots=len(PREFIXES) + 3, num_pages=12 * len(PREFIXES))
    scattered_slots(state, rng)
    first = prefilled(model, state, reference.tokens[:start])
    image = state.image(first)
    state.close(first)
    cases = [(state.restore(image), width, kept) for width, kept in PREFIXES]
    rng.shuffle(cases)

    rows = []
    for request, width, kept in cases:
        drafts = [wrong(token) for token in reference.tokens[start + kept : start + width]]
        rows.append((request, reference.tokens[: start + kept] + drafts))
    logits, hidden = write_rows(model, state, rows)
    offset = 0
    for request, width, kept in cases:
        assert same(logits[offset : offset + kept], reference.logits[start : start + kept])
        assert same(hidden[offset : offset + kept], reference.target_hidden[start : start + kept])
        keep_rows(model, state, request, hidden[offset : offset + width], kept)
        offset += width

    poison(state)
    rng.shuffle(cases)
    blocks = draft_blocks(
        model, state, [case[0] for case in cases], [reference.tokens[start + case[2]] for case in cases]
    )
    for number, (_, _, kept) in enumerate(cases):
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        assert same(blocks.normed[part], reference.drafts[start + kept].normed)
        assert same(blocks.hidden[part], reference.drafts[start + kept].hidden)

    logits, hidden = write_rows(model, state, [(case[0], reference.tokens[: start + case[2] + 3]) for case in cases])
    for number, (_, _, kept) in enumerate(cases):
        part, wanted = slice(3 * number, 3 * number + 3), slice(start + kept, start + kept + 3)
        assert same(logits[part], reference.logits[wanted])
        assert same(hidden[part], reference.target_hidden[wanted])
    state.check_integrity()


@pytest.mark.parametrize("widths", [(0, 3, 5, 1, 5, 0, 0, 2, 4, 5), (5, 0, 5, 0, 5, 0), (1, 2, 3, 4, 5, 4, 3, 2, 1)])
def test_widths_that_change_every_round(model_key, widths):
    """Each round rewinds by nothing: what was not kept is simply written over, however wide the round before was."""
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state, rng = tiny_state(model, num_slots=2), random.Random(len(widths))
    request = prefilled(model, state, reference.tokens[:6])
    for width in widths:
        start, kept = request.committed, 1 + rng.randint(0, width)
        drafts = [wrong(token) for token in reference.tokens[start + kept : start + width + 1]]
        logits, hidden = write_rows(model, state, [(request, reference.tokens[: start + kept] + drafts)])
        assert same(logits[:kept], reference.logits[start : start + kept])
        keep_rows(model, state, request, hidden, kept)
        poison(state)
        block = draft_blocks(model, state, [request], [reference.tokens[request.committed]])
        assert same(block.normed, reference.drafts[request.committed].normed)


@pytest.mark.parametrize("chunk", [1, 2, 3, WINDOW - 1, WINDOW, RING, RING + 1, 2 * RING, 50])
def test_prefill_in_chunks_of_any_size(model_key, chunk):
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state = tiny_state(model, num_slots=2)
    request, logits, hidden = state.open(), [], []
    while request.committed < 60:
        stop = min(request.committed + chunk, 60)
        row_logits, row_hidden = write_rows(model, state, [(request, reference.tokens[:stop])])
        keep_rows(model, state, request, row_hidden)
        poison(state)
        logits.append(row_logits)
        hidden.append(row_hidden)
    assert same(torch.cat(logits), reference.logits[:60])
    assert same(torch.cat(hidden), reference.target_hidden[:60])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -3e38, 1.0])
def test_what_lies_in_the_stores_does_not_matter(model_key, garbage):
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state = tiny_state(model, num_slots=2, garbage=garbage)
    request = state.open()
    for stop in (5, 6, 12, 40, 43, 60):
        start = request.committed
        logits, hidden = write_rows(model, state, [(request, reference.tokens[:stop])])
        keep_rows(model, state, request, hidden)
        assert same(logits, reference.logits[start:stop])
        block = draft_blocks(model, state, [request], [reference.tokens[stop]])
        assert same(block.normed, reference.drafts[stop].normed)


def test_a_slot_that_another_request_left(model_key):
    """A request finds its slot and its pages as the request before left them."""
    model, reference, other = tiny_model(*model_key), row_reference(model_key), row_reference(model_key, seed=1)
    state = tiny_state(model, num_slots=1, num_pages=8, garbage=0.0)
    state.close(prefilled(model, state, other.tokens[:60]))
    for stop in (1, 9, 33):
        request = prefilled(model, state, reference.tokens[:stop])
        logits, _ = write_rows(model, state, [(request, reference.tokens[: stop + 4])])
        assert same(logits, reference.logits[stop : stop + 4])
        state.close(request)
        state.check_integrity()


def test_a_request_whose_rows_are_not_numbers_harms_no_other(model_key):
    """Two requests share a pass; the rows that one of them kept are broken, and only its own results are."""
    model, reference = tiny_model(*model_key), row_reference(model_key)
    for order in (0, 1):
        state = tiny_state(model, num_slots=2)
        broken, sound = prefilled(model, state, reference.tokens[:20]), prefilled(model, state, reference.tokens[:3])
        for ring in state.rings.values():
            ring[broken.slot] = float("nan")
        rows = [(sound, reference.tokens[:8]), (broken, reference.tokens[:22])]
        logits, _ = write_rows(model, state, rows[::-1] if order else rows)
        own, others = (logits[2:], logits[:2]) if order else (logits[:5], logits[5:])
        assert same(own, reference.logits[3:8])
        assert others.isnan().any()


def test_a_larger_ring_changes_nothing(model_key):
    model, reference = tiny_model(*model_key), row_reference(model_key)
    for extra in (1, 7):
        rows = max(ring_rows(ring, BLOCK + 1) for ring in tiny_state(model).geometry.windows) + extra
        state = tiny_state(model, num_slots=2, num_ring_rows=rows)
        request = prefilled(model, state, reference.tokens[:30], chunk=7)
        logits, _ = write_rows(model, state, [(request, reference.tokens[:36])])
        assert same(logits, reference.logits[30:36])
