"""The overhead benchmark: figures of the right kind, over a model that computes nothing. No time is asserted."""

import json

import pytest
import torch

from dspark.bench.host import ENGINE_REQUESTS, SCHEDULER_REQUESTS, SCHEMA, run_host_bench, time_steps
from dspark.bench.null_model import null_model
from dspark.config import Config
from dspark.engine.assembly import assemble, build_loop


@pytest.fixture(scope="module")
def assembly():
    return assemble(max_num_seqs=16, max_model_len=512)


def test_the_null_model_emits_what_it_promises(assembly):
    """Three of five drafts are right, so every round commits four tokens."""
    config = Config(**{**vars(assembly.config), "max_num_seqs": 2})
    speculation = assembly.speculation
    loop = build_loop(null_model(assembly.plan), assembly.tokenizer, config, speculation, 512, torch.device("cpu"))
    _, tokens = time_steps(loop, 2, [5, 6, 7], 0.05)
    assert tokens == 8.0
    assert not loop.has_work
    loop.check_integrity()


def test_the_report_is_complete(assembly):
    figures = []
    report = run_host_bench(assembly, "embedded", [5, 6, 7], 0.01, lambda: figures.append(1))
    read = json.loads(json.dumps(report.as_json()))
    assert read["schema"] == SCHEMA
    assert [row["num_requests"] for row in read["scheduler"]] == list(SCHEDULER_REQUESTS)
    assert [row["num_requests"] for row in read["engine"]] == list(ENGINE_REQUESTS)
    assert all(row["host_ms"] > 0 and row["host_us_per_token"] > 0 and row["host_share"] > 0 for row in read["engine"])
    assert len(figures) == len(SCHEDULER_REQUESTS) + len(ENGINE_REQUESTS)
