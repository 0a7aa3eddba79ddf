"""What a round commits, emits and refuses, one behaviour a test; answers come from the request decoded alone."""

import copy
from dataclasses import replace

import pytest
import torch

from dspark.config.errors import ConfigError, DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine.core import Engine, Speculation
from dspark.scheduler.plan import PlannedSpan, StepPlan
from dspark.speculative.forced import ForcedAcceptance
from dspark.speculative.lengths import ThresholdLengths
from support.alone import bits_of, cut, stream_of
from support.engines import finish, given, step, tiny_engine
from support.row_reference import same
from support.tiny_models import BLOCK, EOS, MAX_LEN, NUM_VALID, LetterTokenizer

V41, V4 = ("v41", False, torch.float32), ("v4", False, torch.float32)
PROMPT = [14, 45, 52, 33, 3, 36, 25, 58, 6]
LONG = SamplingParams(max_tokens=18, ignore_eos=True)


@pytest.fixture(params=[V41, V4], ids=["v41", "v4"])
def model_key(request):
    return request.param


@pytest.fixture
def stream(model_key):
    return stream_of(model_key, PROMPT, LONG, 20)


def started(engine, *request_ids, params=LONG, prompt=PROMPT):
    for request_id in request_ids:
        engine.add(request_id, prompt, params, MAX_LEN)
        engine.start(request_id)
    return [engine.requests[request_id] for request_id in request_ids]


def late_token(stream):
    """A token of the first drafted block that did not come before, and how long the output is with it."""
    place = next(place for place in range(3, 6) if stream.token_ids[place] not in stream.token_ids[:place])
    return stream.token_ids[place], place + 1


def test_rejecting_every_draft_still_moves_on_by_one(model_key, stream):
    """The anchor's row is committed and the target's own token emitted, round after round; nothing else changes."""
    engine = tiny_engine(model_key, given({"a": stream.all_ids}, num_right=0))
    [request] = started(engine, "a")
    step(engine, ["a"])
    while request.finish_reason is None:
        committed = request.state.committed
        [emission] = step(engine, ["a"])
        assert len(emission.token_ids) == 1 and emission.num_accepted == 0
        assert request.state.committed == committed + 1
    assert request.output_ids == stream.token_ids[:18]
    assert sum(request.statistics.accepted) == 0


def test_forcing_an_accepted_length_of_one_is_plain_decoding(model_key, stream):
    """All drafts are rejected by decree, right or wrong."""
    forced = Speculation(BLOCK, forced=ForcedAcceptance.from_length(1.0, BLOCK))
    for speculation in (forced, replace(given({"a": stream.all_ids}), forced=forced.forced)):
        engine = tiny_engine(model_key, speculation)
        [request] = started(engine, "a")
        finish(engine, ["a"])
        assert request.output_ids == stream.token_ids[:18]


def test_accepting_every_draft_emits_each_token_once(model_key, stream):
    """Five drafts and one bonus a round, the bonus not repeated at the start of the next."""
    engine = tiny_engine(model_key, given({"a": stream.all_ids}))
    [request] = started(engine, "a", params=replace(LONG, max_tokens=19))
    emissions = finish(engine, ["a"])["a"]
    assert [len(emission.token_ids) for emission in emissions] == [1, 6, 6, 6]
    assert [token for emission in emissions for token in emission.token_ids] == stream.token_ids[:19]
    assert request.origins == [False] + [True] * 5 + [False] + [True] * 5 + [False] + [True] * 5 + [False]
    assert request.statistics.accepted == [3] * BLOCK
    assert request.statistics.emitted_tokens == 18


@pytest.mark.parametrize("num_right", range(BLOCK + 1))
def test_a_round_emits_the_accepted_drafts_and_one_bonus(model_key, stream, num_right):
    engine = tiny_engine(model_key, given({"a": stream.all_ids}, num_right))
    [request] = started(engine, "a")
    step(engine, ["a"])
    [emission] = step(engine, ["a"])
    assert emission.token_ids == tuple(stream.token_ids[1 : 2 + num_right])
    assert emission.num_accepted == num_right
    assert request.state.committed == len(request.token_ids) - 1


def test_rounds_without_drafts_feed_the_draft_too(model_key, stream):
    """After any number of rounds that verified nothing, the next block is the one of a request that drafted always."""
    engine = tiny_engine(model_key)
    [request] = started(engine, "a")
    while request.finish_reason is None:
        [emission] = step(engine, ["a"], verify_len=0)
        assert emission.num_accepted == 0
        if request.draft is not None:
            drafted = stream.drafts[len(request.token_ids) - 1]
            assert tuple(request.draft.token_ids) == drafted.token_ids
            assert bits_of(request.draft.confidence_logits.tolist()) == bits_of(drafted.confidence)
    assert request.output_ids == stream.token_ids[:18]


def test_a_warm_request_drafts_and_accepts_like_a_cold_one(model_key, stream):
    """The draft's windows are part of an image, so acceptance does not fall after a prefix was reused."""
    engine = tiny_engine(model_key)
    [cold] = started(engine, "cold")
    finish(engine, ["cold"])
    first = engine.add("first", PROMPT, LONG, MAX_LEN)
    engine.start("first")
    engine.step(StepPlan((PlannedSpan("first", 7),)))
    image = engine.image("first")
    engine.remove("first")
    engine.add("warm", PROMPT, LONG, MAX_LEN)
    engine.start("warm", image)
    warm = engine.requests["warm"]
    assert warm.state.committed == 7 and first.finish_reason is None
    finish(engine, ["warm"])
    assert warm.output_ids == cold.output_ids == stream.token_ids[:18]
    assert warm.statistics == cold.statistics
    assert sum(cold.statistics.drafted) > 0


def test_only_final_tokens_are_replayed(model_key, stream):
    """Preempted after every step, with drafts in flight, also twice in a row, a request goes on as if nothing was."""
    engine = tiny_engine(model_key, given({"a": stream.all_ids}, num_right=2))
    [request] = started(engine, "a")
    while request.finish_reason is None:
        step(engine, ["a"])
        for _ in range(2):
            engine.preempt("a")
            assert request.state is None and request.draft is None
            engine.preempt("a")
            engine.start("a")
        assert request.token_ids == stream.all_ids[: len(request.token_ids)]
        if request.finish_reason is None and len(request.output_ids) % 3 == 0:
            engine.step(StepPlan((PlannedSpan("a", 4),)))
    assert request.output_ids == stream.token_ids[:18]


def test_padding_rows_write_nothing(model_key, stream):
    """Every store holds the same bits after a padded step as after the step without padding."""
    stores = []
    for num_padding in (0, 1, 7):
        engine = tiny_engine(model_key, garbage=7.0)
        requests = started(engine, "a", "b")
        for _ in range(4):
            step(engine, ["a", "b"], num_padding=num_padding)
        stores.append({**engine.state.rings, **engine.state.appends})
        assert all(request.output_ids == stream.token_ids[: len(request.output_ids)] for request in requests)
    for key, store in stores[0].items():
        assert same(store, stores[1][key]) and same(store, stores[2][key]), key


def test_the_next_turn_goes_on_behind_a_stop_inside_a_block(model_key, stream):
    """A stop among accepted drafts commits every row up to it: an image then covers the whole first turn."""
    stop_id, length = late_token(stream)
    texts = {"a": stream.all_ids}
    engine = tiny_engine(model_key, given(texts))
    [request] = started(engine, "a", params=replace(LONG, stop_token_ids=(stop_id,)))
    emissions = finish(engine, ["a"])["a"]
    assert request.output_ids == stream.token_ids[:length]
    stopped_inside = emissions[-1].num_accepted == len(emissions[-1].token_ids)
    assert request.state.committed == len(request.token_ids) - (not stopped_inside)
    image = engine.image("a")
    engine.remove("a")
    turn = [*request.token_ids, 20, 21, 22]
    expected = stream_of(model_key, turn, LONG, 8)
    texts["b"] = expected.all_ids
    second = engine.add("b", turn, replace(LONG, max_tokens=8), MAX_LEN)
    engine.start("b", image)
    assert second.num_pending <= 4
    finish(engine, ["b"])
    assert second.output_ids == expected.token_ids


def test_unequal_lengths_and_ends_share_passes(model_key, stream):
    """Verify lengths 0, 5 and 2 in one pass; requests leave at different times; everything is keyed by request."""
    texts = dict.fromkeys("abc", stream.all_ids)
    engine = tiny_engine(model_key, given(texts, lambda name, anchor: {"a": 0, "b": 5, "c": 3}[name]))
    requests = {}
    for name, most in (("a", 4), ("b", 18), ("c", 11)):
        [requests[name]] = started(engine, name, params=replace(LONG, max_tokens=most))
    lengths = {"a": 0, "b": 5, "c": 2}
    for _ in range(40):
        running = [name for name in "bca" if name in engine.requests]
        spans = [(name, engine.needs(name)) for name in running]
        if not spans:
            break
        plan = [PlannedSpan(name, need.num_pending, min(need.verify_len, lengths[name])) for name, need in spans]
        for emission in engine.step(StepPlan(tuple(plan))):
            if emission.finish_reason is not None:
                engine.remove(emission.request_id)
        engine.state.check_integrity()
    assert {name: request.output_ids for name, request in requests.items()} == {
        "a": stream.token_ids[:4], "b": stream.token_ids[:18], "c": stream.token_ids[:11],
    }  # fmt: skip
    assert engine.state.pages.num_free == engine.state.pages.num_pages


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_exactly_max_tokens_come_out_of_a_wider_block(model_key, stream, max_tokens):
    engine = tiny_engine(model_key, given({"a": stream.all_ids}))
    [request] = started(engine, "a", params=replace(LONG, max_tokens=max_tokens))
    emissions = finish(engine, ["a"])["a"]
    assert sum(len(emission.token_ids) for emission in emissions) == max_tokens
    assert request.output_ids == stream.token_ids[:max_tokens]
    assert request.finish_reason == "length"
    assert 1 + request.statistics.emitted_tokens == max_tokens  # the first token ends prefill and is no round


@pytest.mark.parametrize("kind", ["end of sequence", "stop id", "stop string", "stop string over two tokens"])
@pytest.mark.parametrize("place", range(1, 9))
def test_an_end_inside_an_accepted_block(model_key, kind, place):
    """Nothing after it is emitted, shown or counted, and the reason is right."""
    textless = {EOS: -50.0, 0: -50.0, 7: -50.0, 23: -50.0}
    params = SamplingParams(max_tokens=18, temperature=1.0, seed=4, logit_bias=textless)
    stream = stream_of(model_key, PROMPT, params, 20)
    pieces = [LetterTokenizer().decode([token]) for token in stream.token_ids]
    ending = {
        "end of sequence": {"stop_token_ids": (stream.token_ids[place],)},
        "stop id": {"stop_token_ids": (stream.token_ids[place],)},
        "stop string": {"stop": (pieces[place],)},
        "stop string over two tokens": {"stop": (pieces[place - 1] + pieces[place],)},
    }[kind]
    outcome = cut(stream, replace(params, **ending), MAX_LEN)
    engine = tiny_engine(model_key, given({"a": stream.all_ids}))
    if kind == "end of sequence":
        engine.model = copy.copy(engine.model)
        engine.model.plan = replace(engine.model.plan, eos_token_ids=ending["stop_token_ids"])
        ending = {}
    [request] = started(engine, "a", params=replace(params, **ending))
    emissions = finish(engine, ["a"])["a"]
    assert tuple(request.output_ids) == outcome.token_ids
    assert request.finish_reason == outcome.finish_reason == "stop"
    assert "".join(emission.text for emission in emissions) == outcome.text
    assert [emission.finish_reason for emission in emissions[:-1]] == [None] * (len(emissions) - 1)
    assert sum(len(emission.token_ids) for emission in emissions) == len(outcome.token_ids) <= place + 1
    assert 1 + request.statistics.emitted_tokens == len(outcome.token_ids)


def test_the_end_of_sequence_can_be_ignored(model_key, stream):
    engine = tiny_engine(model_key, given({"a": stream.all_ids}))
    engine.model = copy.copy(engine.model)
    engine.model.plan = replace(engine.model.plan, eos_token_ids=tuple(stream.token_ids[:9]))
    [request] = started(engine, "a")
    finish(engine, ["a"])
    assert request.output_ids == stream.token_ids[:18]
    assert request.finish_reason == "length"


def test_an_aborted_request_frees_what_it_held_and_disturbs_nobody(model_key, stream):
    """Aborted between any two steps, with drafts in flight."""
    for steps in range(4):
        engine = tiny_engine(model_key, num_slots=2)
        [staying, leaving] = started(engine, "staying", "leaving")
        for _ in range(steps):
            step(engine, ["leaving", "staying"])
        free = engine.state.pages.num_free
        engine.remove("leaving")
        engine.state.check_integrity()
        assert engine.state.pages.num_free == free + len(staying.state.pages) and leaving.state is None
        started(engine, "newcomer")
        finish(engine, ["newcomer", "staying"])
        assert staying.output_ids == engine.requests["newcomer"].output_ids == stream.token_ids[:18]


def test_a_pass_that_fails_can_be_repeated(model_key, stream, monkeypatch):
    """Rows of a pass that was interrupted are nobody's: the requests are replayed, and give the same tokens."""
    engine = tiny_engine(model_key)
    requests = started(engine, "a", "b")
    for _ in range(2):
        step(engine, ["a", "b"])

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.target, "logits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(engine, ["a", "b"])
    with pytest.raises(AssertionError, match="tentative rows"):
        step(engine, ["a"])
    for name in ("a", "b"):
        engine.preempt(name)
        engine.state.check_integrity()
        engine.start(name)
    finish(engine, ["a", "b"])
    assert [request.output_ids for request in requests] == [stream.token_ids[:18]] * 2


@pytest.mark.parametrize("width", range(1, BLOCK))
def test_fewer_drafts_than_the_trained_block(model_key, stream, width):
    engine = tiny_engine(model_key, Speculation(width), max_query_len=1 + width)
    [request] = started(engine, "a")
    finish(engine, ["a"])
    assert request.output_ids == stream.token_ids[:18]
    assert len(request.statistics.drafted) == width


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_lengths_cut_by_confidence(model_key, stream, threshold):
    engine = tiny_engine(model_key, Speculation(BLOCK, lengths=ThresholdLengths(threshold)))
    [request] = started(engine, "a")
    finish(engine, ["a"])
    assert request.output_ids == stream.token_ids[:18]


def test_a_fork_is_a_request_whose_prompt_is_all_that_was_said(model_key, stream):
    """With parameters of its own: another seed, penalties that count from here, a limit of its own."""
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=77, repetition_penalty=1.3, frequency_penalty=0.5)
    engine = tiny_engine(model_key)
    [source] = started(engine, "source")
    for _ in range(3):
        step(engine, ["source"])
    said = list(source.token_ids)
    fork = engine.fork("source", "fork", params, MAX_LEN)
    finish(engine, ["source", "fork"])
    assert source.output_ids == stream.token_ids[:18]
    assert fork.output_ids == stream_of(model_key, said, params, 9).token_ids


def test_a_fork_that_finds_no_room_leaves_no_request(stream):
    engine = tiny_engine(V41, num_slots=1)
    started(engine, "source")
    step(engine, ["source"])
    with pytest.raises(DSparkError, match="all 1 slots are in use"):
        engine.fork("source", "fork", LONG, MAX_LEN)
    assert list(engine.requests) == ["source"]
    engine.state.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5] * MAX_LEN, f"{MAX_LEN} tokens and the context holds {MAX_LEN}"),
        ([5, 1000], "token id 1000; ids go from 0"),
        ([5, -1], "token id -1"),
    ],
)
def test_prompts_that_are_refused(prompt, message):
    engine = tiny_engine(V41)
    with pytest.raises(ConfigError, match=message):
        engine.add("a", prompt, LONG, MAX_LEN)
    assert not engine.requests


def test_a_request_id_is_taken_once():
    engine = tiny_engine(V41)
    engine.add("a", PROMPT, LONG, MAX_LEN)
    with pytest.raises(ConfigError, match="'a' is running already"):
        engine.add("a", PROMPT, LONG, MAX_LEN)


def test_the_context_ends_an_output():
    """The last token may stand at the last position, and no further; its row is never written."""
    engine = tiny_engine(V41)
    request = engine.add("a", PROMPT, replace(LONG, max_tokens=100), len(PROMPT) + 3)
    engine.start("a")
    finish(engine, ["a"])
    assert request.finish_reason == "length"
    assert len(request.token_ids) == len(PROMPT) + 3


def test_a_state_that_cannot_hold_a_verify_is_refused():
    """Rings for four tentative rows would be overwritten by six."""
    with pytest.raises(ConfigError, match=r"4 tentative rows.*5 drafts.*6"):
        tiny_engine(V41, max_query_len=4)
    tiny_engine(V41, Speculation(), max_query_len=1)


def test_a_plan_cannot_verify_drafts_that_do_not_exist():
    engine = tiny_engine(V41)
    started(engine, "a")
    for plan in (PlannedSpan("a", len(PROMPT), 2), PlannedSpan("a", 3, 1)):
        with pytest.raises(AssertionError, match="drafts that do not exist"):
            engine.step(StepPlan((plan,)))


def test_padded_ids_never_come_out(model_key, stream):
    """The last ids of the vocabulary have no text: whatever their logits, they are neither drawn nor proposed."""
    engine = tiny_engine(model_key)
    model = copy.deepcopy(engine.model)
    model.target.head.weight[NUM_VALID:] = 40.0 * model.target.head.weight[[9, 20, 33, 40]]
    engine = Engine(model, engine.state, LetterTokenizer(), Speculation(BLOCK))
    [request] = started(engine, "a")
    while request.finish_reason is None:
        step(engine, ["a"])
        assert request.draft is None or max(request.draft.token_ids) < NUM_VALID
    assert request.output_ids == stream.token_ids[:18]
    for name in ("logit_bias", "stop_token_ids"):
        asked = {"logit_bias": {NUM_VALID: 1.0}, "stop_token_ids": (NUM_VALID,)}[name]
        with pytest.raises(
            ConfigError, match=f"{name} holds the token id {NUM_VALID}; ids go from 0 to {NUM_VALID - 1}"
        ):
            engine.add("b", PROMPT, replace(LONG, **{name: asked}), MAX_LEN)
