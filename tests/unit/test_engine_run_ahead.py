"""Rounds that run ahead of the host: the tokens, counts and images of the general step, whatever comes between.

Decoding alone and plainly is the yardstick of tokens; the same loop without run-ahead is that of counts.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from dspark.config import DraftHealthConfig
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import assemble, build_loop
from dspark.engine.graphs import GraphCache, GraphPlan
from dspark.engine.speculation import Speculation
from dspark.scheduler.plan import PlannedSpan, StepPlan
from dspark.speculative.forced import ForcedAcceptance
from dspark.speculative.lengths import ThresholdLengths, ThroughputLengths
from dspark.validate.poison import poison
from support.alone import cut, stream_of
from support.engines import run_out, tiny_loop
from support.loops import outcome_of
from support.tiny_models import BLOCK, EOS, MAX_LEN

AHEAD = GraphPlan((1, 2, 3, 4, 6, 12, 18, 24), MAX_LEN, is_captured=False)
STEPWISE = replace(AHEAD, runs_ahead=False)
PLAIN = Speculation()
PROMPT = [5 + number % 60 for number in range(21)]
MODELS = ["v41", "v4"]
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7},
    "filtered": {"temperature": 1.1, "seed": 3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
}


def params(max_tokens=30, **changes):
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True} | changes))


def loop_of(model, graphs=AHEAD, speculation=None, **settings):
    return tiny_loop(model, speculation=speculation, graphs=graphs, **settings)


def tokens_of(emissions):
    return [token for emission in emissions for token in emission.token_ids]


def alone(model, prompt, one):
    """Tokens of a request by itself, out of one long stream of it."""
    stream = stream_of((model,), prompt, one, 60)
    return list(cut(stream, one, MAX_LEN).token_ids)


class Listener:
    """Has rounds launched in parts."""

    def phase(self, name):
        return nullcontext()


def count_rounds(loop):
    """Count the launches of a loop from now on."""
    launches, launch = [], loop._ahead._rounds.launch
    loop._ahead._rounds.launch = lambda shape: (launches.append(shape), launch(shape))
    return launches


@pytest.mark.parametrize("speculation", [None, PLAIN], ids=["drafts", "plain"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_counts_are_those_of_the_general_step(model, sampling, speculation):
    wishes = [(PROMPT[: 4 + 5 * number], params(9 + 7 * number, **SAMPLINGS[sampling])) for number in range(4)]
    found = []
    for graphs in (AHEAD, STEPWISE):
        loop = loop_of(model, graphs, speculation)
        if graphs is AHEAD:
            launches = count_rounds(loop)
        for number, (prompt, one) in enumerate(wishes):
            loop.add(number, prompt, one)
        emissions = run_out(loop)
        found.append(
            (
                {number: outcome_of(emissions[number]) for number in emissions},
                {number: emissions[number][-1].statistics.to_dict() for number in emissions},
            )
        )
    assert found[0] == found[1]
    assert len(launches) > 8
    for number, (prompt, one) in enumerate(wishes):
        assert list(found[0][0][number].token_ids) == alone(model, prompt, one)


@pytest.mark.parametrize("model", MODELS)
def test_an_output_may_end_at_any_token_by_length(model):
    """The last rounds of a request run at its limit, where nothing may be written behind it."""
    stream = alone(model, PROMPT, params(24))
    for most in range(1, 24, 2):
        loop = loop_of(model)
        loop.add("a", PROMPT, params(most))
        loop.add("b", PROMPT[:9], params(24))
        assert tokens_of(run_out(loop)["a"]) == stream[:most]


@pytest.mark.parametrize("kind", ["stop_token_ids", "stop"])
@pytest.mark.parametrize("model", MODELS)
def test_a_stop_is_found_one_round_late_and_nothing_shows_it(model, kind):
    """The next turn starts from the image of the stop, though a later round had begun to write behind it."""
    loop = loop_of(model)
    stream = alone(model, PROMPT, params(24, temperature=1.0, seed=2))
    for place in range(2, 20, 4 if kind == "stop" else 3):
        loop.clear_cache()
        token = stream[place]
        stop = {"stop_token_ids": (token,)} if kind == "stop_token_ids" else {"stop": (chr(48 + token),)}
        one = params(24, temperature=1.0, seed=2, **stop)
        outcomes = []
        for engine in (loop, loop_of(model, graphs=None)):
            engine.add("turn", PROMPT, one)
            ended = run_out(engine)["turn"]
            history = [*PROMPT, *tokens_of(ended), 9, 9]
            engine.add("next", history, params(6))
            following = run_out(engine)["next"]
            outcomes.append((outcome_of(ended), outcome_of(following), following[0].num_cached_tokens))
        assert outcomes[0] == outcomes[1]


def test_end_of_sequence_ends_inside_a_window():
    one = SamplingParams(max_tokens=60, temperature=1.5, seed=1)
    for seed in range(6):
        loop = loop_of("v4")
        loop.add("a", PROMPT, replace(one, seed=seed))
        loop.add("b", PROMPT[:8], params(40))
        tokens = tokens_of(run_out(loop)["a"])
        assert tokens == alone("v4", PROMPT, replace(one, seed=seed))
        assert EOS not in tokens[:-1]


@pytest.mark.parametrize("model", MODELS)
def test_aborts_preemptions_and_arrivals_while_a_round_is_out(model):
    wishes = {
        name: (PROMPT[: 5 + 4 * number], params(26, temperature=0.7, seed=number))
        for number, name in enumerate(["calm", "aborted", "stopped", "late", "later"])
    }
    loop = loop_of(model, num_slots=3)
    emissions = {name: [] for name in wishes}
    for name in ("calm", "aborted", "stopped"):
        loop.add(name, *wishes[name])
    for number in range(300):
        if not loop.has_work:
            break
        if number == 5:
            loop.abort("aborted")
        if number == 6:
            loop.add("late", *wishes["late"])
        if number in (7, 9) and "stopped" in loop.scheduler.running:
            loop.preempt("stopped")
        if number == 10:
            loop.add("later", *wishes["later"])
        poison(loop.engine.state)
        for emission in loop.step():
            emissions[emission.request_id].append(emission)
        loop.check_integrity()
    for name, (prompt, one) in wishes.items():
        expected = alone(model, prompt, one)
        found = tokens_of(emissions[name])
        assert found == (expected[: len(found)] if name == "aborted" else expected)


@pytest.mark.parametrize("model", MODELS)
def test_too_few_pages_end_the_window_and_not_the_requests(model):
    loop = loop_of(model, num_pages=9)
    for number in range(4):
        loop.add(number, PROMPT[: 7 + number], params(40, temperature=1.0, seed=number))
    emissions = run_out(loop)
    assert loop.status().num_preemptions > 0
    for number in range(4):
        one = params(40, temperature=1.0, seed=number)
        assert tokens_of(emissions[number]) == alone(model, PROMPT[: 7 + number], one)


def test_a_request_that_the_device_cannot_draw_goes_the_general_way():
    loop = loop_of("v41")
    launches = count_rounds(loop)
    loop.add("free", PROMPT, params(8))
    loop.add("bound", PROMPT, params(20, repetition_penalty=1.3))
    run_out(loop)
    assert not launches
    loop.add("free", PROMPT, params(8))
    run_out(loop)
    assert launches


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 1.0])
def test_a_threshold_chooses_the_lengths_that_it_chooses_on_the_host(threshold):
    temperatures = (1.3, 0.8, 1.0, 1.1, 2.0)[:BLOCK]
    speculation = Speculation(BLOCK, lengths=ThresholdLengths(threshold), temperatures=temperatures)
    lengths = []
    for graphs in (AHEAD, STEPWISE):
        loop = loop_of("v41", graphs, speculation)
        for number in range(3):
            loop.add(number, PROMPT[: 4 + number], params(25, temperature=0.4, seed=number))
        emissions = run_out(loop)
        lengths.append({number: [one.verify_len for one in emissions[number]] for number in emissions})
    assert lengths[0] == lengths[1]


def test_a_cost_table_fills_the_rows_that_were_settled_before():
    curve = [1.0] * 2 + [1.0 / (1.0 + 0.08 * rows) for rows in range(2, 30)]
    speculation = Speculation(BLOCK, lengths=ThroughputLengths(curve))
    loop = loop_of("v41", speculation=speculation)
    launches = count_rounds(loop)
    wishes = [(PROMPT[: 4 + number], params(30, temperature=0.6, seed=number)) for number in range(4)]
    for number, wish in enumerate(wishes):
        loop.add(number, *wish)
    emissions = run_out(loop)
    for number, wish in enumerate(wishes):
        assert tokens_of(emissions[number]) == alone("v41", *wish)
    assert len({shape.num_rows for shape in launches}) > 1


def test_forced_acceptance_decides_the_same_on_the_device():
    speculation = Speculation(BLOCK, forced=ForcedAcceptance.from_length(2.6, BLOCK))
    found = []
    for graphs in (AHEAD, STEPWISE):
        loop = loop_of("v4", graphs, speculation)
        for number in range(3):
            loop.add(number, PROMPT[: 4 + number], params(25, temperature=0.4, seed=number))
        emissions = run_out(loop)
        found.append({number: [one.token_ids for one in emissions[number]] for number in emissions})
    assert found[0] == found[1]


def test_drafting_rests_and_is_tried_again():
    health = DraftHealthConfig(3.0, 3.0, window=3, probe_after=4, probe_rounds=2)
    loop = loop_of("v41", speculation=Speculation(BLOCK, health=health))
    launches = count_rounds(loop)
    one = params(60, temperature=1.0, seed=5)
    loop.add("a", PROMPT, one)
    assert tokens_of(run_out(loop)["a"]) == alone("v41", PROMPT, one)
    assert {bool(shape.num_blocks) for shape in launches[:-2]} == {True, False}
    counts = loop.engine.health.counts
    assert counts.fallbacks and counts.probes


def test_an_observer_sees_every_round_with_its_block():
    records = []
    for graphs in (AHEAD, STEPWISE):
        loop = loop_of("v41", graphs)
        seen = []
        loop.engine.observer = type("Observer", (), {"observe": lambda self, record, seen=seen: seen.append(record)})()
        loop.add("a", PROMPT, params(30))
        run_out(loop)
        records.append([(replace(one, confidence_logits=None), _bits(one.confidence_logits)) for one in seen])
    assert records[0] == records[1]


def _bits(values):
    return None if values is None else values.view(torch.int32).tolist()


def test_a_window_shrinks_when_requests_end():
    loop = loop_of("v41", speculation=PLAIN)
    launches = count_rounds(loop)
    for number in range(4):
        loop.add(number, PROMPT[: 4 + number], params(6 + 8 * number))
    run_out(loop)
    assert sorted({shape.num_rows for shape in launches}) == [1, 2, 3, 4]


@pytest.mark.parametrize("speculation", [None, PLAIN], ids=["drafts", "plain"])
def test_what_is_captured_launches_something(monkeypatch, speculation):
    """Measured in parts, a round without a draft has no part for it."""
    launched, launch = [], GraphCache.launch
    monkeypatch.setattr(GraphCache, "launch", lambda *args: (launched.append(args[1]), launch(*args))[1])
    loop = loop_of("v4", speculation=speculation)
    loop.engine.stopwatch.listener = Listener()
    loop.add("a", PROMPT, params(12))
    run_out(loop)
    parts = {shape[0] for shape in launched if isinstance(shape[0], str)}
    assert parts == ({"decide"} if speculation is PLAIN else {"decide", "absorb"})


def test_the_general_step_refuses_a_request_whose_rounds_are_out():
    loop = loop_of("v41")
    loop.add("a", PROMPT, params(30))
    while not loop._ahead.is_flying:
        loop.step()
    with pytest.raises(AssertionError, match="tentative rows"):
        loop.engine.step(StepPlan((PlannedSpan("a", 1),)))


def test_the_embedded_model_runs_ahead():
    settled = assemble()
    shapes = GraphPlan((1, 2, 6, 12), settled.max_model_len, is_captured=False)
    model, device = settled.loop.engine.model, settled.placement.device
    parts = settled.tokenizer, settled.config, settled.speculation, settled.max_model_len
    ahead = build_loop(model, *parts, device, shapes=shapes)
    launches, found = count_rounds(ahead), []
    for loop in (ahead, settled.loop):
        for number, text in enumerate(["def add(a, b):", "The harbour was quiet"]):
            one = SamplingParams(max_tokens=24, temperature=float(number), seed=4)
            loop.add(number, settled.tokenizer.encode(text), one)
        emissions = run_out(loop)
        found.append({number: outcome_of(emissions[number]) for number in emissions})
    assert found[0] == found[1]
    assert launches
