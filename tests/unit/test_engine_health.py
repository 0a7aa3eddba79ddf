"""An engine that stops drafting and starts again: it says so, and no token and no later draft depends on it.

Cases A4 (acceptance falls to nothing under load) and S4 (a round without drafts before a drafted one): drafts after a
rest are those of a request that was drafted in every round, because the draft absorbs every committed row.
"""

import logging
from dataclasses import replace

import pytest
import torch

from dspark.config import Config, DraftHealthConfig, SpeculativeConfig
from dspark.config.sampling import SamplingParams
from dspark.engine.core import Speculation
from dspark.engine.speculation import plan_speculation
from dspark.models.facts import model_facts
from dspark.models.registry import parse_config
from support.alone import Draft, bits_of, stream_of
from support.engines import finish, given, run_out, step, tiny_engine, tiny_loop
from support.tiny_models import BLOCK, MAX_LEN, tiny_config

MODELS = {"v41": ("v41", False, torch.float32), "v4": ("v4", False, torch.float32)}
PROMPT = [14, 45, 52, 33, 3, 36, 25, 58, 6]
COUNT = 40
LONG = SamplingParams(max_tokens=COUNT, ignore_eos=True)
RULES = DraftHealthConfig(floor=1.5, recovery=1.5, window=4, probe_after=7, probe_rounds=2)
NEVER_WELL = DraftHealthConfig(floor=BLOCK + 2, recovery=BLOCK + 2, window=1, probe_after=3, probe_rounds=1)


@pytest.fixture(params=MODELS.values(), ids=list(MODELS))
def model_key(request):
    return request.param


def start(engine, *request_ids, params=LONG):
    for request_id in request_ids:
        engine.add(request_id, PROMPT, params, MAX_LEN)
        engine.start(request_id)
    return [engine.requests[request_id] for request_id in request_ids]


def test_drafts_that_are_always_wrong_are_given_up_and_tried_again(model_key, caplog):
    """Three requests: the window fills in two steps, and after a rest a trial of two rounds changes nothing."""
    caplog.set_level(logging.WARNING, logger="dspark.engine")
    stream = stream_of(model_key, PROMPT, LONG, COUNT)
    texts = dict.fromkeys("abc", stream.all_ids)
    engine = tiny_engine(model_key, replace(given(texts, num_right=0), health=RULES))
    requests = start(engine, *texts)
    assert engine.speculation_status == "running"
    widths, reason = [], "the accepted length fell to 1.00, below 1.5; drafting is tried again after 7 rounds"
    while any(request.finish_reason is None for request in requests):
        emissions = step(engine, [name for name in texts if engine.requests[name].finish_reason is None])
        widths.append(sum(emission.verify_len for emission in emissions))
        if len(widths) == 3:
            assert engine.speculation_status == f"not running because {reason}"
    assert widths[:8] == [0, 15, 15, 0, 0, 0, 15, 0]
    assert all(request.output_ids == stream.token_ids for request in requests)
    counts = engine.health.counts
    assert (counts.fallbacks, counts.recoveries) == (1, 0) and counts.probes > 5
    assert counts.rounds_off > 0.5 * engine.statistics.rounds
    assert [record.getMessage() for record in caplog.records] == [f"speculation is not running because {reason}"]


def test_drafts_that_become_right_are_taken_up_again(model_key):
    stream = stream_of(model_key, PROMPT, LONG, COUNT)
    turn = len(PROMPT) + 12
    drafts = given({"a": stream.all_ids}, num_right=lambda request_id, anchor: BLOCK if anchor >= turn else 0)
    engine = tiny_engine(model_key, replace(drafts, health=RULES))
    [request] = start(engine, "a")
    finish(engine, ["a"])
    assert request.output_ids == stream.token_ids
    assert engine.health.counts.recoveries == 1
    assert engine.speculation_status == "running"
    assert request.statistics.accepted[BLOCK - 1] >= 2


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=4)])
def test_a_draft_after_a_rest_is_the_draft_of_an_engine_that_never_rested(model_key, sampling):
    """The bits of ids and confidences, at every anchor where a trial drafts."""
    params = replace(sampling, max_tokens=COUNT, ignore_eos=True)
    stream = stream_of(model_key, PROMPT, params, COUNT)
    engine = tiny_engine(model_key, Speculation(BLOCK, health=NEVER_WELL))
    [request] = start(engine, "a", params=params)
    drafts = {}
    while request.finish_reason is None:
        step(engine, ["a"])
        if request.draft is not None:
            anchor, confidence = len(request.token_ids) - 1, request.draft.confidence_logits
            drafts[anchor] = Draft(tuple(request.draft.token_ids), tuple(confidence.tolist()))
    assert request.output_ids == stream.token_ids
    assert engine.health.counts.probes >= 3 and len(drafts) >= 4
    assert bits_of(drafts) == bits_of({anchor: stream.drafts[anchor] for anchor in drafts})


def test_the_same_requests_rest_in_the_same_rounds(model_key):
    outputs = []
    for _ in range(2):
        engine = tiny_engine(model_key, Speculation(BLOCK, health=RULES))
        start(engine, "a", "b", params=replace(LONG, temperature=1.0, seed=3))
        emissions = finish(engine, "ab")
        outputs.append([[(e.token_ids, e.verify_len) for e in emissions[name]] for name in "ab"])
    assert outputs[0] == outputs[1]


def test_the_status_of_the_loop_tells_it(model_key):
    """Copies of plain numbers: what the engine counts afterwards is not in them."""
    loop = tiny_loop(*model_key, speculation=Speculation(BLOCK, health=NEVER_WELL))
    before = loop.status()
    loop.add("a", PROMPT, LONG)
    run_out(loop)
    after = loop.status()
    assert (before.speculation, before.draft_health.fallbacks) == ("running", 0)
    assert after.speculation.startswith("not running because the accepted length fell to ")
    assert after.draft_health == loop.engine.health.counts and after.draft_health.probes > 3
    assert after.to_dict()["draft_health"]["rounds_off"] == loop.engine.health.counts.rounds_off > 0


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        (SpeculativeConfig(), DraftHealthConfig()),
        (SpeculativeConfig(draft_health=RULES), RULES),
        (SpeculativeConfig(draft_health=None), None),
        # It measures the price of drafting, whatever the drafts are worth.
        (SpeculativeConfig(spec_decode_acceptance_length=1.0), None),
    ],
)
def test_what_the_configuration_says_reaches_the_engine(settings, rules):
    facts = model_facts(parse_config(tiny_config("v41")), fingerprint="", has_vision=False)
    assert plan_speculation(Config(speculative_config=settings), facts, {}).health == rules
