"""Images, forks and restores give what the request itself would have given, and leave the others alone."""

import pytest
import torch

from dspark.state.pages import OutOfPagesError
from support.row_reference import draft_blocks, keep_rows, prefilled, row_reference, same, write_rows
from support.schedules import poison
from support.tiny_models import NUM_VALID, WINDOW, tiny_model, tiny_state

MODELS = {"v41": ("v41", False, torch.float32), "v4 quantised bf16": ("v4", True, torch.bfloat16)}
PAGE = 8


@pytest.fixture(params=MODELS, ids=str)
def model_key(request):
    return MODELS[request.param]


def continues(model, state, request, reference, num_rows=6):
    """The next rows and the next draft are the reference's."""
    start = request.committed
    logits, hidden = write_rows(model, state, [(request, reference.tokens[: start + num_rows])])
    keep_rows(model, state, request, hidden)
    block = draft_blocks(model, state, [request], [reference.tokens[request.committed]])
    return same(logits, reference.logits[start : start + num_rows]) and same(
        block.normed, reference.drafts[request.committed].normed
    )


@pytest.mark.parametrize("length", [0, 1, WINDOW, PAGE * 2 - 1, PAGE * 2, PAGE * 2 + 1, 37])
def test_a_restored_image_continues_like_the_request(model_key, length):
    """Also when the request has gone on, or has ended, since the image was made."""
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state = tiny_state(model)
    request = prefilled(model, state, reference.tokens[:length], chunk=5)
    image = state.image(request)
    assert continues(model, state, request, reference)
    restored = state.restore(image)
    assert restored.committed == length
    assert continues(model, state, restored, reference)
    for ended in (request, restored):
        state.close(ended)
    poison(state)
    again = state.restore(image)
    state.drop(image)
    poison(state)
    assert continues(model, state, again, reference)
    assert continues(model, state, again, reference)
    state.close(again)
    state.check_integrity()
    assert state.pages.num_free == state.pages.num_pages


@pytest.mark.parametrize("length", [WINDOW + 3, PAGE * 2, PAGE * 3 - 1])
def test_forks_go_separate_ways(model_key, length):
    """Fork and source write different tokens at the same positions, into pages that they shared before."""
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state = tiny_state(model)
    source = prefilled(model, state, reference.tokens[:length])
    other = [*reference.tokens[:length], *((token + 5) % NUM_VALID for token in reference.tokens[length:])]
    alone_state = tiny_state(model)
    alone = prefilled(model, alone_state, other[:length], chunk=1)
    fork = state.fork(source)
    state.check_integrity()
    assert fork.slot != source.slot
    for stop in (length + 3, length + 4, length + 15):
        start = fork.committed
        logits, hidden = write_rows(model, state, [(fork, other[:stop]), (source, reference.tokens[:stop])])
        wanted, wanted_hidden = write_rows(model, alone_state, [(alone, other[:stop])])
        count = stop - start
        assert same(logits[:count], wanted)
        assert same(logits[count:], reference.logits[start:stop])
        keep_rows(model, state, fork, hidden[:count])
        keep_rows(model, state, source, hidden[count:])
        keep_rows(model, alone_state, alone, wanted_hidden)
        state.check_integrity()


def test_whole_pages_are_shared_and_open_ones_copied(model_key):
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state = tiny_state(model)
    request = prefilled(model, state, reference.tokens[: 2 * PAGE + 3])
    image = state.image(request)
    first, second = state.restore(image), state.restore(image)
    assert first.pages[:2] == second.pages[:2] == request.pages[:2]
    assert len({first.pages[2], second.pages[2], request.pages[2]}) == 3
    state.check_integrity()


def test_images_of_the_same_position_are_told_apart(model_key):
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state = tiny_state(model)
    request = prefilled(model, state, reference.tokens[:9])
    images = [state.image(request) for _ in range(3)]
    for image in (images[1], images[2], images[0]):
        state.drop(image)
        state.check_integrity()
    assert state.images == []


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(model_key):
    """A restore that finds no page for its copy gives its slot and its shares back; so does a fork."""
    model, reference = tiny_model(*model_key), row_reference(model_key)
    state = tiny_state(model, num_pages=3)
    request = prefilled(model, state, reference.tokens[: 2 * PAGE + 3])
    for _ in range(5):
        with pytest.raises(OutOfPagesError, match="all 3 pages are in use"):
            state.fork(request)
        state.check_integrity()
    with pytest.raises(OutOfPagesError):
        write_rows(model, state, [(request, reference.tokens[: 3 * PAGE + 1])])
    state.check_integrity()
    assert request.tentative == 0
    assert continues(model, state, request, reference, num_rows=5)
