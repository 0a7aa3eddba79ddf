"""The benchmark's own arithmetic: order of runs, comparison of tokens, sums over prompts, and the packaged prompts."""

import json

import pytest
import torch

from dspark.bench.generate import SCHEMA, Item, first_difference, run_generate_bench
from dspark.bench.prompts import DOMAINS, load_prompts
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams
from support.fake_engine import FakeLLM

CPU = torch.device("cpu")
ITEMS = [Item("code", "code-1", (1, 2)), Item("code", "code-2", (3,)), Item("math", "math-1", (4,))]


class Logged(FakeLLM):
    """Writes its name and the prompt of each run to a list that both modes share."""

    def named(self, name, log):
        self.name, self.log = name, log
        return self

    def generate(self, prompts, params):
        self.log.append((self.name, *prompts, params.max_tokens))
        return super().generate(prompts, params)


def run(plain=None, drafted=None, repeats=2):
    return run_generate_bench(
        plain or FakeLLM(accepted=0),
        drafted or FakeLLM(),
        ITEMS,
        SamplingParams(max_tokens=16),
        model="fake",
        device=CPU,
        repeats=repeats,
    )


def test_modes_alternate_and_the_warm_up_is_apart():
    log = []
    run(Logged(accepted=0).named("plain", log), Logged().named("dspark", log))
    assert [name for name, *_ in log] == ["plain", "dspark"] * (1 + 2 * len(ITEMS))
    assert all(tokens < 16 for *_, tokens in log[:2])
    assert all(tokens == 16 for *_, tokens in log[2:])


def test_rows_sum_over_prompts():
    report = run()
    code, math = report.domains
    assert (code.name, code.num_prompts, code.num_tokens) == ("code", 2, 32)
    assert (math.name, math.num_prompts, math.num_tokens) == ("math", 1, 16)
    # One token by the prompt's own pass, then 4 + 4 + 4 + 3 in four rounds.
    assert report.total.accepted_len == pytest.approx(15 / 4)
    assert report.total.acceptance == pytest.approx((1.0, 1.0, 0.75, 0.0, None), nan_ok=True)
    low, high = report.total.accepted_len_interval
    assert low < 15 / 4 < high
    assert report.is_identical


@pytest.mark.parametrize("text", ["the quick red fox", "the quick", ""])
def test_a_different_token_is_found(text):
    report = run(plain=FakeLLM(accepted=0), drafted=FakeLLM(text=text or "x"))
    assert not report.is_identical
    assert report.total.num_different == len(ITEMS)


def test_report_is_json_with_a_schema():
    report = json.loads(json.dumps(run().as_json()))
    assert report["schema"] == SCHEMA
    assert set(report["peak_bytes"]) == {"plain", "dspark"}
    assert [prompt["name"] for prompt in report["prompts"]] == [item.name for item in ITEMS]
    assert all(len(prompt["seconds"]["dspark"]) == 2 for prompt in report["prompts"])


def test_nothing_to_measure_is_refused():
    with pytest.raises(DSparkError):
        run(repeats=0)


@pytest.mark.parametrize(
    ("left", "right", "place"), [([], [], None), ([1], [1], None), ([1], [2], 0), ([1, 2], [1], 1), ([], [7], 0)]
)
def test_first_difference(left, right, place):
    assert first_difference(left, right) == place


def test_packaged_prompts_name_source_and_licence():
    prompts = load_prompts()
    assert {prompt.domain for prompt in prompts} == set(DOMAINS)
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.source
        assert prompt.licence
        assert (prompt.text is None) != (not prompt.messages)
        assert prompt.text is None or prompt.text.strip()
    for domain in DOMAINS:
        assert len(load_prompts([domain])) >= 6
        assert len(load_prompts([domain], 2)) == 2
