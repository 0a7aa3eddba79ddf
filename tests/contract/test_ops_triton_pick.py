"""Picks in parts: however many steps the best rows are chosen in, they are those of a sort, ties included."""

import importlib
import importlib.util

import pytest
import torch

from dspark.ops.index import pick_rows

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
WIDTHS = (300, 9000, 70_000, 300_000) if ON_GPU else (30, 129, 290)


@pytest.fixture
def kernel(monkeypatch):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    module = importlib.import_module("dspark.ops.triton.pick")
    if not ON_GPU:
        if not importlib.import_module("dspark.ops.triton.launch").INTERPRETED:
            pytest.skip("there is no accelerator, and triton was imported before the interpreter was asked for")
        monkeypatch.setattr(module, "_LONGEST_BLOCK", 64)
        monkeypatch.setattr(module, "_PART", 32)
    return module


def inputs(width: int, num_values: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of few different values, both zeros among them; rows that see nothing, little, all and more than all."""
    generator = torch.Generator().manual_seed(width)
    scores = torch.randint(-num_values, num_values + 1, (7, width), generator=generator) / num_values
    scores = torch.where(torch.rand(7, width, generator=generator) < 0.1, -0.0, scores)
    visible = torch.tensor([0, 1, 5, width // 2, width - 1, width, width + 9])
    candidates = torch.rand(7, width + 3, generator=generator) < 0.4
    return scores.to(DEVICE), visible.to(DEVICE), candidates.to(DEVICE)


@pytest.mark.parametrize("num_values", [2, 10_000])
@pytest.mark.parametrize("width", WIDTHS)
def test_picks_in_parts_are_those_of_a_sort(kernel, width, num_values):
    scores, visible, candidates = inputs(width, num_values)
    count = 512 if ON_GPU else 6
    for chosen_from in (None, candidates):
        wanted = pick_rows(scores, visible, chosen_from, count)
        assert torch.equal(kernel.pick_rows(scores, visible, chosen_from, count), wanted)


def test_infinite_scores(kernel):
    """No infinity is taken for a row that is not there."""
    width, count = WIDTHS[-1], 6
    scores = torch.full((2, width), float("-inf"), device=DEVICE)
    scores[1, 40::50] = float("inf")
    visible = torch.full((2,), width, device=DEVICE)
    assert torch.equal(kernel.pick_rows(scores, visible, None, count), pick_rows(scores, visible, None, count))


def test_more_picks_than_a_block_holds(kernel, monkeypatch):
    """A part that leaves as many as it was given would never end."""
    monkeypatch.setattr(kernel, "_LONGEST_BLOCK", 64)
    scores, visible, candidates = inputs(290, 10_000)
    for chosen_from in (None, candidates):
        assert torch.equal(
            kernel.pick_rows(scores, visible, chosen_from, 70), pick_rows(scores, visible, chosen_from, 70)
        )


def test_rows_of_the_lowest_score_are_picked_before_rows_that_may_not_be():
    scores = torch.tensor([[1.0, float("-inf"), float("-inf"), float("-inf")]])
    candidates = torch.tensor([[False, False, True, True]])
    assert pick_rows(scores, torch.tensor([4]), candidates, 2).tolist() == [[2, 3]]
