"""Pairs of a route grouped by expert: every pair has one place, every place one tile of its expert.

Story: tiles are what products read; a pair that no tile names would be left out without a word. Experts whose weights
are elsewhere have no tile. Not tested here: what products make of tiles (`test_ops_triton_products.py`).
"""

import importlib
import importlib.util

import pytest
import torch

from dspark.ops.route import Route

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
EXPERTS, SLOTS = 7, 3


@pytest.fixture(scope="module")
def kernels():
    """The modules of the kernels, or the reason why they cannot run here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if not ON_GPU and not importlib.import_module("dspark.ops.triton.launch").INTERPRETED:
        pytest.skip("there is no accelerator, and triton was imported before the interpreter was asked for")
    return tuple(importlib.import_module(f"dspark.ops.triton.{name}") for name in ("grouping", "route"))


def check_tiles(tiles, expert_ids, held):
    """Each held pair is at one place, in a tile of its expert and row; no other pair is in a tile."""
    first, second = tiles
    pairs, rows = second.targets.tolist(), first.sources.tolist()
    assert sorted(pairs) == list(range(expert_ids.numel()))
    assert rows == [pair // SLOTS for pair in pairs]
    assert first.targets.tolist() == second.sources.tolist() == list(range(len(pairs)))
    chosen, covered = expert_ids.flatten().tolist(), []
    for expert, start, count in first.table.tolist():
        assert count <= first.rows
        for pair in pairs[start : start + count]:
            assert chosen[pair] == held.start + expert
            covered.append(pair)
    assert sorted(covered) == [pair for pair, expert in enumerate(chosen) if expert in held]


@pytest.mark.parametrize("held", [range(EXPERTS), range(2, 5)], ids=["all", "some"])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_every_pair_is_in_one_tile(kernels, num_rows, held):
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.rand(num_rows, EXPERTS, generator=generator).argsort(-1)[:, :SLOTS].to(DEVICE)
    route = Route(ids, torch.ones(num_rows, SLOTS, device=DEVICE), None if len(held) == EXPERTS else held)
    check_tiles(kernels[0].tiles_of(route, len(held)), ids.cpu(), held)


@pytest.mark.parametrize("held", [None, range(2, 5)], ids=["all", "some"])
def test_a_row_alone_comes_grouped(kernels, held):
    """A router's kernel groups a single row itself, as the launch for many would."""
    x = torch.randn(1, EXPERTS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    numbers = SLOTS, True, 1e-20, 1.0
    bias, gate = torch.zeros(EXPERTS, device=DEVICE), torch.eye(EXPERTS, device=DEVICE)
    route = kernels[1].route_rows(x, gate, bias, None, *numbers, held)
    assert route.groups is not None
    num_held = EXPERTS if held is None else len(held)
    check_tiles(kernels[0].tiles_of(route, num_held), route.expert_ids.cpu(), held or range(EXPERTS))
