"""The acceptance benchmark: which rounds count and how far, what is pooled, and the command on engines of straw.

A real tiny engine shows that an observer sees every round that the statistics count, and changes no token.
"""

import json
import lzma

import pytest
import torch

from dspark.bench.acceptance import SCHEMA, Drafter, Setting, run_acceptance_bench, settings_for
from dspark.bench.acceptance_plot import plot_acceptance
from dspark.bench.generate import Item
from dspark.bench.heldout import PROMPT_CHARS, cut_prompts
from dspark.bench.rounds import DecidedRound, confidence_pairs, judge_confidence, keep_round, survival_pairs
from dspark.cli import app as app_module
from dspark.cli import session
from dspark.cli.bench_inputs import choose_prompts
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine.core import Speculation
from dspark.engine.observer import RoundRecord
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.train.corpus import parse_document
from support.engines import tiny_loop
from support.fake_engine import WIDTH, FakeCompletion, FakeLLM
from support.tiny_models import BLOCK

CPU = torch.device("cpu")
ITEMS = [Item("code", "code-1", (1, 2)), Item("code", "code-2", (3,)), Item("math", "math-1", (4,))]
GREEDY = Setting(0.0, "keyed")
LOGITS = torch.tensor([3.0, 1.0, 0.0, -1.0, -3.0])


class ObservedLLM(FakeLLM):
    """Emits one token, then `accepted` drafts and a bonus a round, and tells an observer of each round."""

    observer = None
    width = WIDTH

    def observe_rounds(self, observer):
        self.observer = observer

    def generate(self, prompts, params):
        return [self.complete(number, prompt, params) for number, prompt in enumerate(prompts)]

    def complete(self, number, prompt, params):
        tokens = self.tokenizer.encode(self.text)[: params.max_tokens]
        place = 1
        while place < len(tokens):
            room = params.max_tokens - place
            verify_len = min(self.width, room - 1)
            accepted = min(self.accepted, verify_len)
            emitted = min(accepted + 1, len(tokens) - place)
            anchor = len(prompt) + place - 1
            self.observer.observe(RoundRecord(number, anchor, (0,) * self.width, LOGITS, verify_len, accepted, emitted))
            place += emitted
        return FakeCompletion(tokens, AcceptanceStatistics(WIDTH), request_id=number)

    @property
    def speculation(self):
        return Speculation(num_speculative_tokens=self.width)


def run(*drafters, items=ITEMS, max_tokens=12, settings=(GREEDY,)):
    named = [Drafter(name, engine, WIDTH) for name, engine in drafters]
    params = SamplingParams(max_tokens=max_tokens)
    return run_acceptance_bench(named, items, settings, params, model="fake", device=CPU)


def record(num_accepted, num_emitted, verify_len=WIDTH):
    return RoundRecord(0, 10, (0,) * WIDTH, LOGITS, verify_len, num_accepted, num_emitted)


def test_no_round_is_cut_by_the_limit():
    # Text enough: rounds begin with 1, 5 and 9 tokens out; the one that begins with 13 does not count.
    (measured,) = run(("draft", ObservedLLM(text="x" * 100))).runs
    assert [len(prompt.rounds) for prompt in measured.prompts] == [3, 3, 3]
    assert all(one.verify_len == WIDTH and one.num_accepted == 3 for p in measured.prompts for one in p.rounds)
    assert measured.rows[-1].accepted_len == 4.0


@pytest.mark.parametrize(
    ("accepted", "emitted", "counted", "known"), [(3, 4, 3, WIDTH), (3, 3, 3, 3), (3, 1, 1, 1), (0, 1, 0, WIDTH)]
)
def test_drafts_behind_a_stop_are_neither_accepted_nor_known(accepted, emitted, counted, known):
    kept = keep_round(record(accepted, emitted))
    assert (kept.num_accepted, kept.num_known) == (counted, known)


def test_confidence_is_judged_where_the_fate_is_known():
    rounds = [
        DecidedRound(3, 3, 1, 3, (0.9, 0.8, 0.5)),
        DecidedRound(3, 3, 3, 3, (1.0, 0.5, 0.5)),
        DecidedRound(3, 3, 2, 2, (0.7, 0.6, 0.1)),
    ]
    assert confidence_pairs(rounds, 2).tolist() == [[0.8, 0.0], [0.5, 1.0], [0.6, 1.0]]
    assert confidence_pairs(rounds, 3).tolist() == [[0.5, 1.0]]
    assert survival_pairs(rounds, 3) == pytest.approx(torch.tensor([[0.36, 0.0], [0.25, 1.0]]).numpy())
    quality = judge_confidence(rounds, 3)
    assert [one.num_confidence for one in quality] == [3, 3, 1, 7]
    assert quality[1].auc == 0.0
    assert quality[2].auc is None


def test_without_a_confidence_head_there_is_no_quality():
    assert judge_confidence([DecidedRound(1, 1, 1, 1, ())], 1) == ()


def test_gains_are_over_the_same_prompts():
    report = run(("draft", ObservedLLM(text="x" * 100)), ("baseline", ObservedLLM(text="x" * 100, accepted=1)))
    assert [gain.domain for gain in report.gains] == ["code", "math", "all"]
    assert all(gain.ratio == 2.0 and gain.num_different == 0 for gain in report.gains)
    assert report.gains[0].interval == pytest.approx((2.0, 2.0))


def test_other_tokens_than_the_baseline_are_counted():
    report = run(("draft", ObservedLLM(text="x" * 100)), ("baseline", ObservedLLM(text="y" * 100)))
    assert report.gains[-1].num_different == len(ITEMS)


def test_a_shorter_block_is_not_compared_by_length():
    single = ObservedLLM(accepted=1)
    single.width = 1
    drafters = [Drafter("a", ObservedLLM(), WIDTH), Drafter("b", single, 1)]
    report = run_acceptance_bench(drafters, ITEMS, [GREEDY], SamplingParams(max_tokens=8), model="fake", device=CPU)
    assert report.gains == ()


def test_samplers_are_one_at_temperature_0():
    names = [setting.name for setting in settings_for([0.0, 1.0], ["keyed", "ratio"])]
    assert names == ["T=0", "T=1 keyed", "T=1 ratio"]


def test_interruption_keeps_finished_runs():
    def stop():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    calls = []
    report = run_acceptance_bench(
        [Drafter("a", ObservedLLM(), WIDTH)],
        ITEMS,
        settings_for([0.0, 1.0], ["keyed"]),
        SamplingParams(max_tokens=8),
        model="fake",
        device=CPU,
        on_prompt=stop,
    )
    assert report.is_interrupted
    assert [run.setting.name for run in report.runs] == ["T=0"]


def test_nothing_to_measure_is_refused():
    with pytest.raises(DSparkError):
        run(("a", ObservedLLM()), items=[])
    with pytest.raises(DSparkError):
        run(("a", ObservedLLM()), ("a", ObservedLLM()))


def test_report_is_json_and_a_picture():
    report = run(("draft", ObservedLLM(text="x" * 100)), ("b", ObservedLLM(text="x" * 100, accepted=1)))
    read = json.loads(json.dumps(report.as_json()))
    assert read["schema"] == SCHEMA
    assert read["runs"][0]["rows"][-1]["accepted_len"][0] == 4.0
    assert plot_acceptance(report).startswith(b"\x89PNG")


def test_an_observer_sees_every_round_and_changes_nothing():
    class Log(list):
        observe = list.append

    def generate(observer):
        loop = tiny_loop("v41")
        loop.engine.observer = observer
        requests = []
        for number, temperature in enumerate([0.0, 1.0]):
            params = SamplingParams(temperature=temperature, max_tokens=14, ignore_eos=True)
            requests.append(loop.add(number, [5, 9, 11 + number], params))
        while loop.has_work:
            loop.step()
        return requests

    log = Log()
    watched, alone = generate(log), generate(None)
    assert [request.output_ids for request in watched] == [request.output_ids for request in alone]
    for request in watched:
        records = [one for one in log if one.request_id == request.request_id]
        statistics = AcceptanceStatistics(BLOCK)
        for one in records:
            statistics.record(
                one.verify_len, one.num_accepted, num_drafted=len(one.draft_ids), num_emitted=one.num_emitted
            )
            start = one.anchor_position + 1
            agreed = request.token_ids[start : start + min(one.num_accepted, one.num_emitted)]
            assert list(one.draft_ids[: len(agreed)]) == agreed
            assert not one.draft_ids or one.confidence_logits.shape == (BLOCK,)
        assert statistics == request.statistics


def write_corpus(folder, domain, records):
    with lzma.open(folder / f"heldout-{domain}.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_corpus_passages_come_from_different_documents_and_sources():
    lines = "".join(f"line number {n} of a text\n" for n in range(200))
    texts = [("a", lines)] * 5 + [("b", lines)] + [("c", "too short")]
    prompts = cut_prompts("docs", [parse_document("docs", source, text) for source, text in texts], 4)
    assert sorted(prompt.source for prompt in prompts) == ["a", "a", "a", "b"]
    for prompt in prompts:
        assert prompt.text.startswith("line number")
        assert PROMPT_CHARS - 30 < len(prompt.text) <= PROMPT_CHARS


def test_corpus_dialogues_end_with_a_question():
    text = "Topic: Tea\nA: Hello\nB: Hi\nA: How are you?\nB: Fine\nA: Good"
    documents = [parse_document("chat", "chitchat", text)] * 6
    endings = {prompt.messages[-1]["content"] for prompt in cut_prompts("chat", documents, 6)}
    assert endings == {"Hello", "How are you?"}


def test_a_folder_holds_a_corpus_or_questions(tmp_path):
    write_corpus(tmp_path, "math", [{"source": "sum", "text": "User: 1 + 1 =\nAssistant: 2"}] * 3)
    (prompt,) = choose_prompts(tmp_path, ["math"], 1)
    assert prompt.messages == ({"role": "user", "content": "1 + 1 ="},)
    questions = tmp_path / "questions"
    questions.mkdir()
    (questions / "quiz.jsonl").write_text('{"turns": ["a", "b"]}\n{"text": "c"}\n', encoding="utf-8")
    first, second = choose_prompts(questions, None, None)
    assert (first.domain, first.messages[0]["content"], second.text) == ("quiz", "a", "c")
    (questions / "bad.jsonl").write_text('{"question": "a"}\n', encoding="utf-8")
    with pytest.raises(DSparkError, match=r"bad.jsonl, line 1"):
        choose_prompts(questions, ["bad"], None)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `dspark bench acceptance` on engines of straw: exit code, stdout, stderr."""

    def run(*words):
        monkeypatch.setattr(session, "LLM", lambda model, **settings: ObservedLLM(text="x" * 100))
        monkeypatch.setattr("sys.argv", ["dspark", "bench", "acceptance", "--domain", "code", "--prompts", "2", *words])
        with pytest.raises(SystemExit) as ended:
            app_module.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


def test_command_prints_tables_and_json(command, tmp_path):
    code, out, _ = command("--baseline", f"other={tmp_path}", "--max-tokens", "8", "--plot", str(tmp_path / "a.png"))
    assert code == 0
    assert "T=1 ratio" in out
    assert "accepted length over the baseline's" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = command("--json", "--temperature", "0.5", "--sampler", "ratio", "--max-tokens", "8")
    assert code == 0
    assert [run["setting"] for run in json.loads(out)["runs"]] == ["T=0.5 ratio"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--baseline", "nameless"], "NAME=DIR"),
        (["--baseline", "a=no/such/model"], "no/such/model does not exist"),
        (["--temperature", "-1"], "temperature"),
        (["--sampler", "dice"], "--sampler"),
        (["--prompt-dir", "no/such/folder"], "no/such/folder"),
        (["--plot", "picture.jpg"], "picture.jpg"),
        (["--max-tokens", "0"], "max_tokens"),
    ],
)
def test_a_mistake_costs_one_sentence(command, words, reason):
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert reason in err
    assert "Traceback" not in err
