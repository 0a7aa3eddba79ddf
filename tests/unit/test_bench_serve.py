"""The serving benchmark against a server of straw: what is sent, what is seen of an answer, failures by kind, turns."""

import asyncio
import json
import os
import signal
import sys
import threading

import pytest

from dspark.bench.load import ClosedLoop, OpenLoop
from dspark.bench.prompts import BenchPrompt, load_prompts
from dspark.bench.serve import SCHEMA, ServeSettings, Target, num_expected, run_serve_bench
from dspark.bench.serve_client import CHAT, COMPLETIONS, _Answer
from dspark.bench.serve_plot import plot_serve
from dspark.bench.serve_process import ServerProcess
from dspark.bench.serve_requests import (
    LengthRange,
    RequestSettings,
    mixed_domains,
    read_prompt_file,
    text_requests,
)
from dspark.bench.serve_stream import MalformedStreamError, read_events
from dspark.bench.serve_table import serve_lines, serve_tables
from dspark.cli import app as app_module
from dspark.config.errors import DSparkError
from support.fake_openai import (
    ACCEPTED_LEN,
    CACHED_TOKENS,
    CHUNKS,
    FIRST_S,
    GAP_S,
    NUM_TOKENS,
    PROMPT_TOKENS,
    SLOW_S,
    FakeOpenAI,
)

pytest.importorskip("httpx")
REQUESTS = RequestSettings(max_tokens=NUM_TOKENS)
TWO_CLIENTS = (ClosedLoop(2),)


@pytest.fixture
def server():
    with FakeOpenAI() as server:
        yield server


@pytest.fixture
def ours():
    with FakeOpenAI(is_dspark=True) as server:
        yield server


def texts(*words):
    return [BenchPrompt("test", word, "test", "none", text=word) for word in words]


def measure(*servers, prompts=("hello",), loads=TWO_CLIENTS, settings=None, requests=REQUESTS, **more):
    targets = [Target(f"side {number}", server.url) for number, server in enumerate(servers)]
    settings = settings or ServeSettings(num_requests=6, num_warmup=2, timeout_s=5.0)
    return run_serve_bench(targets, loads, texts(*prompts), settings, requests, **more)


def test_a_run_counts_what_the_server_sent(server):
    report = measure(server)
    (level,) = report.levels
    (figures,) = level.sides
    assert (figures.num_requests, figures.num_failed, figures.num_warmup) == (6, 0, 2)
    assert figures.completion_tokens == 6 * NUM_TOKENS
    assert figures.prompt_tokens == 6 * PROMPT_TOKENS
    assert figures.cached_tokens == 6 * CACHED_TOKENS
    assert figures.chunk_gap.count == 6 * (len(CHUNKS) - 1)
    assert figures.itl_basis == "chunks"
    assert server.most_at_once == 2
    assert len(server.bodies) == 8 == num_expected(TWO_CLIENTS, 1, ServeSettings(6, 2))
    # A timer never fires early, so these bounds hold on any machine.
    assert figures.ttft.p50 >= 1e3 * FIRST_S * 0.99
    assert figures.chunk_gap.p50 >= 1e3 * GAP_S * 0.9
    assert figures.tpot.mean == pytest.approx((figures.e2e.mean - figures.ttft.mean) / (NUM_TOKENS - 1))
    assert (figures.accepted_len, figures.accepted_len_source) == (3.0, "metrics")
    assert figures.acceptance == (1.0, 1.0)


def test_our_server_is_asked_for_token_ids(ours, server):
    figures = measure(ours).levels[0].sides[0]
    assert (figures.itl_basis, figures.itl.count) == ("tokens", 6 * (NUM_TOKENS - 1))
    assert (figures.accepted_len, figures.accepted_len_source) == (ACCEPTED_LEN, "responses")
    assert all(body["stream_origins"] is True for body in ours.bodies)
    measure(server)
    assert all("stream_origins" not in body for body in server.bodies)


def test_requests_are_those_of_the_settings(server):
    requests = RequestSettings(max_tokens=5, temperature=0.5, seed=100)
    measure(server, prompts=("a", "b"), loads=(ClosedLoop(1),), requests=requests)
    warmup, measured = server.bodies[:2], server.bodies[2:]
    assert [body["prompt"] for body in measured] == ["a", "b"] * 3
    assert [body["seed"] for body in measured] == list(range(100, 106))
    assert [body["seed"] for body in warmup] == [106, 107]
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 5, 0.5)
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body


def test_a_slow_first_token_is_seen_in_ttft_alone(server):
    slow = measure(server, prompts=("slow",)).levels[0].sides[0]
    assert slow.ttft.p50 >= 1e3 * SLOW_S * 0.99
    assert slow.e2e.p50 > slow.ttft.p50


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("refuse", "http 500"),
        ("drop", "dropped"),
        ("error", "server error in the stream"),
        ("garbage", "malformed"),
        ("silent", "empty"),
        ("hang", "timeout"),
        ("nousage", "no usage"),
    ],
)
def test_failures_are_counted_by_kind_and_excluded(server, word, kind):
    settings = ServeSettings(num_requests=4, num_warmup=0, timeout_s=1.0)
    report = measure(server, prompts=(word, "fine"), settings=settings)
    figures = report.levels[0].sides[0]
    assert figures.errors == {kind: 2}
    assert (figures.num_requests, figures.completion_tokens) == (2, 2 * NUM_TOKENS)
    assert any(kind in line for line in serve_lines(report))


def test_a_server_that_is_not_there_is_one_sentence():
    with pytest.raises(DSparkError, match="does not answer"):
        run_serve_bench([Target("x", "http://127.0.0.1:9")], [ClosedLoop(1)], texts("a"), ServeSettings(1), REQUESTS)


def test_an_open_loop_does_not_wait_for_answers(server):
    settings = ServeSettings(num_requests=10, num_warmup=0)
    figures = measure(server, prompts=("slow",), loads=(OpenLoop(200.0),), settings=settings).levels[0].sides[0]
    assert figures.num_requests == 10
    assert server.most_at_once > 5  # all arrive within about 50 ms, and each takes 150 ms


def test_two_sides_take_turns_with_the_same_requests():
    log = []

    class Logged(FakeOpenAI):
        async def _complete(self, body, writer):
            log.append((self.name, body["seed"]))
            await super()._complete(body, writer)

    first, second = Logged(is_dspark=True), Logged(is_dspark=True)
    first.name, second.name = "first", "second"
    settings = ServeSettings(num_requests=5, num_warmup=1, block_len=2)
    with first, second:
        report = measure(first, second, loads=(ClosedLoop(1),), settings=settings)
    assert log[:2] == [("first", 5), ("second", 5)]
    turns = [("first", 0), ("first", 1), ("second", 0), ("second", 1)]
    turns += [("second", 2), ("second", 3), ("first", 2), ("first", 3), ("first", 4), ("second", 4)]
    assert log[2:] == turns
    comparison = report.levels[0].comparison
    assert (comparison.num_pairs, comparison.num_different, comparison.compared_by) == (5, 0, "token ids")
    assert comparison.e2e.interval is not None and comparison.output_throughput.interval is not None
    assert report.num_different == 0
    assert any("all 5 identical" in line for line in serve_lines(report))


def test_blocks_are_long_enough_for_their_load(server):
    settings = ServeSettings(num_requests=100)
    assert [settings.block_of(load, 2) for load in (ClosedLoop(1), ClosedLoop(16), OpenLoop(1.0))] == [8, 32, 25]
    assert settings.block_of(ClosedLoop(16), 1) == 100
    with pytest.raises(DSparkError, match="cannot keep 2 at once"):
        measure(server, server, settings=ServeSettings(num_requests=6, block_len=1))


def test_other_tokens_on_the_second_side_are_found(ours):
    with FakeOpenAI([*CHUNKS[:-1], ("g", (8,))], is_dspark=True) as other:
        report = measure(ours, other)
    assert report.num_different == 6
    assert any("DIFFER" in line for line in serve_lines(report))


@pytest.mark.parametrize("timeout", [0.0, float("nan"), float("inf")])
def test_a_timeout_is_a_positive_time(timeout):
    with pytest.raises(DSparkError, match="a positive timeout"):
        ServeSettings(num_requests=1, timeout_s=timeout)


def test_the_report_is_json_with_a_schema_and_without_the_key(ours, server):
    settings = ServeSettings(num_requests=2, num_warmup=1, api_key="secret")
    report = measure(ours, server, loads=(ClosedLoop(1), OpenLoop(50.0)), settings=settings)
    text = json.dumps(report.as_json(), allow_nan=False)
    assert "secret" not in text
    value = json.loads(text)
    assert set(value) == {"schema", "machine", "settings", "sides", "interrupted", "levels"}
    assert value["schema"] == SCHEMA
    assert [side["model"] for side in value["sides"]] == ["fake", "fake"]
    assert [level["load"]["kind"] for level in value["levels"]] == ["closed", "open"]
    level = value["levels"][0]
    assert set(level) == {"load", "sides", "comparison", "requests"}
    assert {"ttft", "itl", "tpot", "e2e", "chunk_gap", "errors", "duration_s"} <= set(level["sides"][0])
    assert set(level["sides"][0]["ttft"]) == {"mean", "p50", "p90", "p99", "count"}
    assert len(level["requests"]) == 2 and len(level["requests"][0]) == 2
    assert {"number", "name", "ttft_ms", "e2e_ms", "error"} <= set(level["requests"][0][0])
    assert len(serve_tables(report)) == 3


def test_the_picture_is_a_png(server):
    pytest.importorskip("matplotlib")
    assert plot_serve(measure(server, loads=(ClosedLoop(1), ClosedLoop(2)))).startswith(b"\x89PNG")


def test_an_interruption_keeps_what_was_measured(server):
    main = threading.main_thread().ident
    seen = []

    def interrupt(record):
        seen.append(record)
        if len(seen) == 5:
            signal.pthread_kill(main, signal.SIGINT)

    report = measure(server, settings=ServeSettings(num_requests=200, num_warmup=1), on_result=interrupt)
    assert report.is_interrupted
    assert 4 <= report.levels[0].sides[0].num_requests < 200
    assert report.as_json()["interrupted"] is True


def test_random_prompts_have_the_asked_lengths_and_repeat(server):
    requests = RequestSettings(max_tokens=4, input_len=LengthRange(3, 9), output_len=LengthRange(2, 5), seed=1)
    measure(server, loads=(ClosedLoop(1),), requests=requests)
    again = [(body["prompt"], body["max_tokens"]) for body in server.bodies]
    measure(server, loads=(ClosedLoop(1),), requests=requests)
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies[len(again) :]] == again
    assert {len(prompt) for prompt, _ in again} <= set(range(3, 10))
    assert {length for _, length in again} <= set(range(2, 6))
    assert len({length for _, length in again}) > 1
    assert all(body["ignore_eos"] is True for body in server.bodies)


def test_dialogues_go_to_chat_and_texts_to_completions():
    requests = text_requests(load_prompts(per_domain=1), 5, REQUESTS)
    assert [request.path for request in requests] == [COMPLETIONS, COMPLETIONS, CHAT, COMPLETIONS, CHAT]
    chat = text_requests(texts("hi"), 1, RequestSettings(4, endpoint="chat"))
    assert chat[0].body["messages"] == [{"role": "user", "content": "hi"}]
    with pytest.raises(DSparkError, match="dialogue"):
        text_requests(load_prompts(["chat"]), 1, RequestSettings(4, endpoint="completions"))


def test_few_requests_are_of_all_domains():
    mixed = mixed_domains(load_prompts())
    assert [prompt.name for prompt in mixed[:6]] == ["code-1", "docs-1", "math-1", "prose-1", "chat-1", "code-2"]
    assert sorted(prompt.name for prompt in mixed) == sorted(prompt.name for prompt in load_prompts())
    assert mixed_domains(texts("a", "b")) == texts("a", "b")


def test_a_prompt_file_is_read_line_by_line():
    lines = [{"turns": ["one", "two"]}, {"prompt": "three"}, {"messages": [{"role": "user", "content": "four"}]}]
    prompts = read_prompt_file("\n\n".join(map(json.dumps, lines)), "p.jsonl")
    assert [prompt.text for prompt in prompts] == [None, "three", None]
    assert prompts[0].messages == ({"role": "user", "content": "one"},)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"turns": []}', '{"prompt": 3}', '{"messages": ["x"]}', "{}"])
def test_a_prompt_file_without_a_prompt_names_the_line(text):
    with pytest.raises(DSparkError, match=r"p\.jsonl"):
        read_prompt_file(text, "p.jsonl")


@pytest.mark.parametrize("words", ["", "x", "0", "5:3", "-1", "1:2:3"])
def test_a_length_that_is_none_is_refused(words):
    with pytest.raises(DSparkError, match="--input-len"):
        LengthRange.parse(words, "--input-len")


def events(*chunks):
    async def collect():
        async def stream():
            for chunk in chunks:
                yield chunk

        return [event async for event in read_events(stream())]

    return asyncio.run(collect())


def test_events_are_cut_at_blank_lines_only():
    text = 'data: {"text": "a\u2028b\x85"}'
    assert events(text.encode()[:20], text.encode()[20:], b"\n", b"\n") == [text[6:]]
    assert events(b": comment\n\nevent: x\r\ndata: 1\r\n", b"data:2\r\n\r\n", b"data: 3") == ["1\n2", "3"]
    with pytest.raises(MalformedStreamError):
        events(b"data: \xff\n\n")


FAKE_SERVER = """
import sys, time
sys.path[:0] = {path!r}
from support.fake_openai import FakeOpenAI
assert sys.argv[1:] == ["serve", "--host", "127.0.0.1", "--port", "0", *{arguments!r}], sys.argv
with FakeOpenAI(is_dspark=True) as server:
    print("listening on", server.url, flush=True)
    time.sleep(60)
"""


def fake_program(*arguments):
    return (sys.executable, "-c", FAKE_SERVER.format(path=sys.path, arguments=arguments))


def test_a_server_is_started_found_and_stopped():
    with ServerProcess(["--draft", "off"], program=fake_program("--draft", "off")) as server:
        assert server.is_alive()
        pid = server.pid
        report = measure(server)
        assert report.levels[0].sides[0].num_requests == 6
    assert not server.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_cannot_start_says_why():
    program = (sys.executable, "-c", "import sys; sys.exit('no such model')")
    with pytest.raises(DSparkError, match="no such model"), ServerProcess([], program=program):
        pass


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command; returns its exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dspark", "bench", "serve", *words])
        with pytest.raises(SystemExit) as ended:
            app_module.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


def test_the_command_prints_tables_and_writes_files(run, ours, tmp_path):
    report, picture = tmp_path / "r.json", tmp_path / "r.png"
    code, out, err = run(
        *("--url", f"{ours.url}/v1", "--requests", "3", "--concurrency", "1,2", "--rate", "100"),
        *("--json", str(report), "--plot", str(picture)),
    )
    assert code == 0, err
    assert "TTFT" in out and "1 at once" in out and "100/s" in out
    assert json.loads(report.read_text())["schema"] == SCHEMA
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_fails_when_the_sides_disagree(run, ours):
    with FakeOpenAI([("x", (9,))], is_dspark=True) as other:
        code, out, err = run("--url", ours.url, "--url", other.url, "--requests", "2", "--json", "-")
    assert code == 1
    assert "differ" in err
    assert json.loads(out)["levels"][0]["comparison"]["num_different"] == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--concurrency", "0"), "concurrency"),
        (("--concurrency", "1,x"), "--concurrency"),
        (("--rate", "-1"), "rate"),
        (("--requests", "0"), "at least 1 request"),
        (("--input-len", "9:1"), "--input-len"),
        (("--url", "http://127.0.0.1:9", "--compare", "--draft off"), "--url"),
        (("--server-args", "a", "--server-args", "b", "--compare", "c"), "two settings"),
        (("--prompt-file", "none.jsonl"), "none.jsonl"),
        (("--json", "nowhere/r.json"), "nowhere"),
        (("--plot", "r.svg"), ".png"),
    ],
)
def test_a_mistake_costs_one_sentence(run, words, sentence):
    code, _, err = run(*words)
    assert code == 2
    assert sentence in err and "Traceback" not in err


def test_tokens_that_follow_their_text_belong_to_its_moment():
    answer = _Answer(offers_token_ids=True)
    answer.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    answer.take({"choices": [{"delta": {"content": "ab"}}], "dspark": {"token_ids": [1, 2]}}, 2.0)
    answer.take({"choices": [{"delta": {"content": "c"}}]}, 3.0)
    answer.take({"choices": [{"delta": {}, "finish_reason": "stop"}], "dspark": {"token_ids": [3]}}, 3.5)
    assert answer.arrivals == [(2.0, 2), (3.0, 1)]
    assert (answer.last, answer.token_ids, answer.texts) == (3.5, [1, 2, 3], ["", "ab", "c", ""][1:])
