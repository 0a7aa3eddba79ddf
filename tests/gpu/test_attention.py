"""Attention at the sizes of a real model: what many rows get, each of them gets alone, whichever way it is computed."""

import importlib

import pytest
import torch

from dspark.ops.attention import attend as twin
from dspark.ops.rope import rope_frequencies, rotations

pytestmark = pytest.mark.gpu

HEADS, WIDTH, WINDOW, PICKS, ROWS = 64, 512, 128, 512, 50


@pytest.fixture(scope="module")
def kernel():
    return importlib.import_module("dspark.ops.triton.attention")


@pytest.fixture(scope="module")
def inputs():
    """Fewer picks in some rows than in others, and windows that begin with the request."""
    generator = torch.Generator().manual_seed(1)
    near, far = torch.randn(400, WIDTH, generator=generator), torch.randn(4000, WIDTH, generator=generator)
    window = torch.randint(0, 400, (ROWS, WINDOW), generator=generator)
    picks = torch.randint(0, 4000, (ROWS, PICKS), generator=generator)
    number = torch.arange(ROWS)
    window.masked_fill_(torch.arange(WINDOW) < WINDOW - 3 * number.unsqueeze(1), -1)
    picks.masked_fill_(torch.arange(PICKS) >= 10 * number.unsqueeze(1), -1)
    q, sink = torch.randn(ROWS, HEADS, WIDTH, generator=generator), torch.randn(HEADS, generator=generator)
    cos, sin = rotations(number * 977, rope_frequencies(64, 10000.0, None))
    parts = q.bfloat16(), cos, sin, near.bfloat16(), window, far.bfloat16(), picks, sink
    return tuple(part.cuda() for part in parts)


def call(function, inputs, rows=slice(None), capacity=PICKS):
    q, cos, sin, near, window, far, picks, sink = inputs
    sources = [(near, window[rows]), (far, picks[rows, :capacity])]
    return function(q[rows], (cos[rows], sin[rows]), sources, sink, WIDTH**-0.5, 1e-6)


def test_segments_by_one_program_or_by_many(kernel, inputs, monkeypatch):
    together = call(kernel.attend, inputs)
    monkeypatch.setattr(kernel, "_FEW_ROWS", ROWS)
    assert torch.equal(call(kernel.attend, inputs), together)
    monkeypatch.setattr(kernel, "_FEW_ROWS", 0)
    assert torch.equal(call(kernel.attend, inputs), together)


def test_a_row_alone(kernel, inputs):
    together = call(kernel.attend, inputs)
    for row in (0, 1, 17, ROWS - 1):
        assert torch.equal(call(kernel.attend, inputs, slice(row, row + 1))[0], together[row])


def test_capacity_is_no_part_of_the_meaning(kernel, inputs):
    """The first rows have at most 100 picks; how far their index reaches beyond changes nothing."""
    rows = slice(0, 11)
    assert torch.equal(call(kernel.attend, inputs, rows, 128), call(kernel.attend, inputs, rows))


def test_values(kernel, inputs):
    found, wanted = call(kernel.attend, inputs).float(), call(twin, inputs).float()
    assert ((found - wanted).abs() / (1 + wanted.abs())).max() < 2e-2
