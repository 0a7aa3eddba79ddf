"""What a pass launches on a branch touches nothing that is launched beside it: no order of the two changes a bit.

Property: between the beginning of a branch and its join, no launch of it reads or writes what another one writes, and
every branch is joined.
Story: a graph runs branches at the same time as the rest, and a race between them shows rarely and only there. Here the
launches of a whole pass are interpreted one after the other, and their reads and writes are compared; a result that is
used before the join is a race as well.
"""

import importlib
from dataclasses import replace

import pytest
import torch

from dspark.bench.dummy_weights import dummy_model
from dspark.engine.fixed_passes import FixedDraft, FixedTarget, PassRows
from dspark.models.registry import parse_config
from dspark.ops.places import RowPlaces
from support.op_sets import backend
from support.races import RaceWatch
from support.tiny_models import BLOCK, NUM_VALID, tiny_config, tiny_state

# Two requests, one of which completes groups of every ratio.
POSITIONS, SLOTS, PAGES, CAPACITY = (6, 15), (0, 1), ((0, 1, 2), (3, 4, 5)), 24


@pytest.fixture
def watch():
    return RaceWatch()


@pytest.fixture
def ops(watch, monkeypatch):
    ops = backend("triton interpreted").ops
    monkeypatch.setattr(importlib.import_module("dspark.ops.triton.experts"), "Beside", watch.branch)
    return replace(ops, beside=watch.branch)


@pytest.mark.parametrize("family", ["v4", "v41"])
@torch.no_grad()
def test_no_branch_of_a_pass_disturbs_what_runs_beside_it(ops, watch, monkeypatch, family):
    model = dummy_model(parse_config(tiny_config(family, True)), ops, torch.bfloat16, torch.device("cpu"))
    state = tiny_state(model, garbage=7.25)
    positions, slots, owners = torch.tensor(POSITIONS), torch.tensor(SLOTS), torch.arange(2)
    ngrams = torch.full((2, model.plan.max_ngram), 3) if model.plan.max_ngram else None
    rows = PassRows(torch.tensor([5, 6]), RowPlaces(positions, slots, owners, torch.tensor(PAGES)), ngrams)
    target, draft = FixedTarget(model, state), FixedDraft(model, state, BLOCK, NUM_VALID)
    with watch.watching(monkeypatch):
        _, features = target.run(rows, CAPACITY)
        draft.keep(features, positions, slots)
        draft.blocks(torch.tensor([5, 6]), positions + 1, slots)
    names = {launch.branch.name for launch in watch.launches if launch.branch is not None}
    assert names == {"maps", "shared"} and len(watch.launches) > 200
    assert watch.races == [] and not watch.not_joined


def test_a_race_is_seen(ops, watch, monkeypatch):
    """Of kernels and of torch, in either direction, through a view; none before the branch and after its join."""
    x, y = torch.randn(4, 32).bfloat16(), torch.randn(4, 32).bfloat16()
    with watch.watching(monkeypatch):
        y.add_(1)
        x.mul_(2)
        branch = watch.branch(x.device, "one")
        with branch:
            ops.rms_norm(x, None, 1e-6)
            y[1:].add_(1)
        assert watch.not_joined == {"one"}
        x[2:].mul_(2)
        ops.rms_norm(y, None, 1e-6)
        branch.join()
        y.add_(1)
    assert len(watch.races) == 2 and {name for name, *_ in watch.races} == {"one"}
