"""The tape of a pass in pieces, with graphs that are emulated: what a launch would compute again is computed again.

An emulated graph runs its piece over the static inputs and puts the results where the captured ones lie. So everything
but the capture itself is the shipped code: padding, buffers shared by layers, rotations that pieces hand on.
"""

import random
from contextlib import nullcontext

import pytest
import torch

from dspark.config.sampling import SamplingParams
from dspark.engine.graphs import GraphPlan
from dspark.engine.piecewise import PiecewiseTarget
from dspark.layers.attention import PassContext
from support.schedules import Drive, make_wish
from support.tiny_models import MAX_LEN

PLAN = GraphPlan((), MAX_LEN, runs_ahead=False, piece_counts=(3, 9, 20))
PROMPT = [11, 40, 8, 8, 62, 33, 5, 29, 71, 2, 18, 50, 47, 9, 66]


class EmulatedGraph:
    """Piece `number` of a tape."""

    def __init__(self, number, pieces, tape, session):
        self.number, self.pieces, self.tape, self.session = number, pieces, tape, session

    def replay(self):
        tape, session = self.tape, self.session
        if self.number == 0:
            session["context"] = PassContext()
            session["stages"] = self.pieces._target.stages(tape.tokens, tape.positions, session["context"])
        try:
            self.pieces._crossed(session["stages"].send(tape.heads[self.number - 1] if self.number else None))
        except StopIteration as end:
            tape.output.hidden.copy_(end.value.hidden)
            if tape.output.target_hidden is not None:
                tape.output.target_hidden.copy_(end.value.target_hidden)
        for key, turn in session["context"].turns.items():
            for kept, fresh in zip(tape.context.turns[key], turn, strict=True):
                kept.copy_(fresh)


@pytest.fixture
def launches(monkeypatch):
    """Capture without a device; counts the passes that are launched."""
    captured, replayed = PiecewiseTarget._captured, PiecewiseTarget._replayed
    seen = []

    def emulated(self, tokens, positions):
        tape = captured(self, tokens, positions)
        session = {}
        tape.graphs = [EmulatedGraph(number, self, tape, session) for number in range(len(tape.graphs))]
        return tape

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(PiecewiseTarget, "_captured", emulated)
    monkeypatch.setattr(PiecewiseTarget, "_replayed", lambda *given: (seen.append(given[1]), replayed(*given))[1])
    return seen


@pytest.mark.parametrize("model_key", [("v41",), ("v41", True), ("v4",), ("v4", True)])
def test_every_request_gives_what_it_gives_alone(model_key, launches):
    params = SamplingParams(max_tokens=13, ignore_eos=True, logprobs=1)
    wishes = [make_wish(model_key, PROMPT[:count], params, 14) for count in (1, 6, 15)]
    for seed in range(3):
        Drive(model_key, random.Random(seed), wishes, "own", PLAN).run()
    tapes = {id(tape): tape for tape in launches}
    assert len(launches) > 20 and len(tapes) >= 3
    for tape in tapes.values():
        assert len(tape.graphs) == len(tape.seams) + 1
