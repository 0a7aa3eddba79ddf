"""The soak run's own parts: what it sends, what it takes for wrong, what it calls a leak, and a short run of straw."""

import asyncio
import json
import random
from dataclasses import replace

import pytest

from dspark.bench.serve import Target
from dspark.bench.soak import SoakSettings, run_soak
from dspark.bench.soak_client import HUNG, WRONG, Outcome, SoakClient
from dspark.bench.soak_mix import BUSY, DROPPED, LEFT, OK, Act, Leave, Mix, MixSettings
from dspark.bench.soak_oracle import Reservoir, Verdict, sampling_of
from dspark.bench.soak_plot import plot_soak
from dspark.bench.soak_report import SCHEMA
from dspark.bench.soak_table import soak_lines, soak_tables
from dspark.bench.soak_watch import Sample, read_sample, trend_of
from dspark.config.errors import DSparkError
from support.fake_openai import CHUNKS, NUM_TOKENS, FakeOpenAI

pytest.importorskip("httpx")
MIX = MixSettings(
    seed=3,
    vocabulary=range(5, 400),
    max_model_len=256,
    texts=["once upon a time", "def f(x):"],
    model="fake",
    max_body_bytes=2000,
    dialogues=[[{"role": "user", "content": "hi"}]],
)
MIB = 2**20


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Nobody waits long for a server of straw."""
    monkeypatch.setattr("dspark.bench.soak._SAMPLE_EVERY_S", 0.1)
    monkeypatch.setattr("dspark.bench.soak._REST_S", 0.5)
    monkeypatch.setattr("dspark.bench.soak_client._RAW_WAIT_S", 0.2)


def acts(count=600, settings=MIX):
    mix = Mix(settings)
    return [mix.act(number) for number in range(count)]


def test_the_mix_is_a_function_of_its_seed():
    assert acts() == acts()
    assert acts(50) != acts(50, replace(MIX, seed=4))


def test_the_mix_holds_every_kind_and_each_says_what_is_right():
    made = acts()
    kinds = {act.kind for act in made}
    assert kinds == {
        *(
            "completion",
            "chat",
            "shared prefix",
            "long",
            "n > 1",
            "stop strings",
            "filters and penalties",
            "few tokens",
        ),
        *("structured json", "structured regex", "structured choice", "leaves a stream", "leaves early"),
        *("prompt too long", "body too large", "malformed", "no HTTP"),
    }
    for act in made:
        assert act.expected
        assert act.is_comparable == (act.expected == frozenset({OK}) | BUSY)
    assert {act.is_streamed for act in made if act.is_comparable} == {True, False}
    plain = acts(settings=replace(MIX, dialogues=(), has_structured=False, max_body_bytes=None))
    assert {act.kind for act in plain} == {kind for kind in kinds if "struct" not in kind} - {"chat", "body too large"}


def test_prompts_fit_and_those_that_must_not_fit_do_not():
    for act in acts():
        if act.is_comparable and isinstance(act.body.get("prompt"), list):
            assert 1 <= len(act.body["prompt"]) + act.body["max_tokens"] <= MIX.max_model_len, act
        if act.kind == "prompt too long":
            assert len(act.body["prompt"]) >= MIX.max_model_len
        if act.kind == "body too large":
            assert len(act.body) > MIX.max_body_bytes


def test_comparable_requests_become_sampling_parameters():
    for act in acts():
        if act.is_comparable and not act.kind.startswith("structured"):
            params = sampling_of(act.body, 7)
            assert (params.seed, params.max_tokens) == (7, act.body["max_tokens"])
            assert params.temperature == act.body["temperature"]
            assert list(params.stop) == act.body.get("stop", [])


def act(prompt="hello", expected=frozenset({OK}), **more):
    fields = {"path": "/v1/completions", **more}
    stream = {"stream": True, "stream_options": {"include_usage": True}} if fields.pop("stream", True) else {}
    body = fields.pop("body", None) or {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream_origins": True, **stream}
    return Act(0, "test", body=body, expected=expected, **fields)


def play(server, *played, timeout_s=5.0):
    async def run():
        client = SoakClient(server.url, timeout_s)
        outcomes = [await client.play(act) for act in played]
        await client.close()
        return outcomes

    return asyncio.run(run())


@pytest.fixture
def server():
    with FakeOpenAI(is_dspark=True) as server:
        yield server


def test_a_whole_answer_is_read_streamed_or_not(server):
    for outcome in play(server, act(), act(stream=False)):
        assert outcome.result == OK and outcome.is_right
        (sample,) = outcome.samples
        assert sample.text == "".join(text for text, _ in CHUNKS)
        assert sample.token_ids == list(range(1, NUM_TOKENS + 1))
        assert (sample.finish_reason, outcome.num_tokens, outcome.num_cached_tokens) == ("length", NUM_TOKENS, 4)


def test_clients_that_go_are_no_failure(server):
    outcomes = play(
        server,
        act(leave=Leave(chunks=2), expected=frozenset({LEFT})),
        act("hang", leave=Leave(seconds=0.05), expected=frozenset({LEFT})),
        act(leave=Leave(seconds=0.0), stream=False, expected=frozenset({LEFT})),
        act(body=b"\x00\x01", is_raw=True, path="", expected=frozenset({LEFT})),
    )
    assert [outcome.result for outcome in outcomes] == [LEFT] * 4
    assert play(server, act())[0].result == OK


@pytest.mark.parametrize(
    ("prompt", "result"),
    [("drop", DROPPED), ("refuse", "http 500"), ("error", "error in the stream"), ("garbage", WRONG), ("hang", HUNG)],
)
def test_what_may_not_happen_is_named(server, prompt, result):
    (outcome,) = play(server, act(prompt), timeout_s=0.5)
    assert outcome.result == result and not outcome.is_right


def test_answers_are_checked_for_what_can_be_seen_of_them(server):
    wrong = [
        act(body={"prompt": "x", "n": 2, "stream_origins": True}),
        act(body={"prompt": "x", "max_tokens": NUM_TOKENS - 1, "stream_origins": True}),
        act(body={"prompt": "x", "max_tokens": NUM_TOKENS + 1, "stream_origins": True}),
        act(body={"prompt": "x"}, check=lambda text, reason: "def" not in text),
        act(body={"prompt": "nousage", "stream": True, "stream_origins": True}),
    ]
    outcomes = play(server, *wrong)
    assert [outcome.result for outcome in outcomes] == [WRONG] * len(wrong)
    for outcome, word in zip(
        outcomes, ("samples", "more than", "ended for its length", "breaks", "usage"), strict=True
    ):
        assert word in outcome.message


def test_refusals_must_have_the_shape_of_the_api(server):
    refused = frozenset({"http 400", "http 404"})
    outcomes = play(server, act(body=b"{", expected=refused), act(body=b"{}", path="/v1/nothing", expected=refused))
    assert [outcome.result for outcome in outcomes] == ["http 400", "http 404"]


def test_every_answer_of_a_kind_has_the_same_chance_to_be_compared():
    counts = [0] * 10
    for seed in range(600):
        reservoir = Reservoir(2, seed)
        for number in range(10):
            reservoir.offer(Outcome(replace(act(), number=number), OK, "", 0.0))
        assert len(reservoir.outcomes) == 2
        for outcome in reservoir.outcomes:
            counts[outcome.act.number] += 1
    assert all(80 < count < 160 for count in counts)  # 120 of 600 each


def samples(level_of, seconds=600, noise=2 * MIB):
    own = random.Random(1)
    return [Sample(float(t), rss_bytes=int(level_of(t) + own.uniform(-noise, noise))) for t in range(seconds)]


def rss(sample):
    return sample.rss_bytes


def test_memory_that_only_wanders_is_flat():
    trend = trend_of(samples(lambda t: 500 * MIB), rss, 120.0)
    assert trend.is_flat
    assert -2 * MIB < trend.interval[0] < trend.growth < trend.interval[1] < 2 * MIB
    assert trend.stretch_s == pytest.approx(470, abs=10)


def test_memory_that_grows_is_a_leak_and_growth_before_the_warm_up_is_none():
    leak = trend_of(samples(lambda t: 500 * MIB + t * 0.1 * MIB), rss, 120.0)
    assert not leak.is_flat and leak.growth == pytest.approx(47 * MIB, rel=0.1)
    filled = trend_of(samples(lambda t: 300 * MIB + min(t, 100) * 2 * MIB), rss, 120.0)
    assert filled.is_flat


def test_a_short_run_has_no_trend():
    assert trend_of(samples(lambda t: 500 * MIB, seconds=100), rss, 0.0) is None
    assert trend_of([Sample(0.0)], rss, 0.0) is None


def test_a_sample_counts_pages_that_nobody_owns():
    page = json.dumps({"num_running": 0, "num_waiting": 0, "num_pages": 9, "num_free_pages": 4, "num_cached_pages": 3})
    sample = read_sample(1.0, None, page, "process_resident_memory_bytes 5e6\n")
    assert (sample.is_idle, sample.num_held_pages, sample.rss_bytes) == (True, 2, 5_000_000)
    assert read_sample(1.0, None, None, None) == Sample(1.0)


class Straw:
    """An oracle that agrees, or not."""

    def __init__(self, difference=""):
        self.difference = difference
        self.prompts = []

    def judge(self, outcome, prompt_ids):
        self.prompts.append(prompt_ids)
        return Verdict(outcome.act.number, outcome.act.kind, 7, self.difference)


@pytest.fixture
def stopping():
    """A server whose answers end by themselves, whatever the limit was."""
    with FakeOpenAI(is_dspark=True, finish_reason="stop") as server:
        yield server


def soak(server, oracle=None, **settings):
    chosen = {"seconds": 1.0, "concurrency": 4, "burst": 6, "burst_every_s": 0.5, "timeout_s": 5.0, **settings}
    return run_soak(Target("fake", server.url), SoakSettings(**chosen), lambda length: oracle or Straw())


def test_a_run_finds_what_is_wrong_with_a_server_of_straw(stopping):
    report = soak(stopping)
    # The server of straw answers everything alike, so limits and stops are not kept to.
    assert any("another outcome" in violation for violation in report.violations)
    assert not any("pages" in violation or "idle" in violation for violation in report.violations)
    assert report.num_requests > 50 and report.verdicts
    value = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert value["schema"] == SCHEMA
    assert sum(number for results in value["results"].values() for number in results.values()) == report.num_requests
    assert value["at_rest"]["num_running"] == 0
    assert len(value["samples"]["at_s"]) == len(report.log.samples) >= 2
    assert {"number", "kind", "result", "expected", "message", "body"} <= set(value["wrong"][0])
    assert len(soak_tables(report)) == 2 and any("VIOLATION" in line for line in soak_lines(report))


def test_pages_that_stay_and_other_tokens_are_violations(stopping):
    stopping.engine["num_free_pages"] = 3
    report = soak(stopping, Straw("sample 0 differs at token 3"), seconds=0.5)
    assert any("2 pages" in violation for violation in report.violations)
    assert any("differs at token 3" in violation for violation in report.violations)


def test_the_picture_is_a_png(server):
    pytest.importorskip("matplotlib")
    assert plot_soak(soak(server, seconds=0.3)).startswith(b"\x89PNG")


def test_another_server_is_refused():
    with FakeOpenAI() as other, pytest.raises(DSparkError, match="server of this package"):
        soak(other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"concurrency": 0},
        {"burst": -1},
        {"burst_every_s": float("nan")},
        {"timeout_s": 0},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(DSparkError, match="soak run"):
        SoakSettings(**{"seconds": 1.0, **wrong})
