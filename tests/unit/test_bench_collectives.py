"""The bench of sums and exchanges, between processes of this machine."""

import json

from typer.testing import CliRunner

from dspark.cli.app import app
from dspark.config.errors import DSparkError


def test_every_operation_is_measured():
    result = CliRunner().invoke(app, ["bench", "collectives", "--cpu", "--tp", "2", "--rows", "3", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["schema"] == "dspark.bench.collectives/1" and report["num_ranks"] == 2
    assert [(row["operation"], row["num_rows"], row["is_exact"]) for row in report["rows"]] == [
        ("sum", 3, True),
        ("gather", 3, True),
    ]


def test_what_cannot_be_measured_is_refused():
    for options in (["--tp", "1"], ["--rows", "0"], ["--tp", "64"], ["--tp", "8"]):
        result = CliRunner().invoke(app, ["bench", "collectives", *options])
        assert isinstance(result.exception, DSparkError)


def test_no_more_processes_are_started_than_an_engine_may_have_ranks(monkeypatch):
    monkeypatch.setattr("dspark.cli.bench_collectives.run_collective_bench", None)
    result = CliRunner().invoke(app, ["bench", "collectives", "--cpu", "--tp", "10000"])
    assert isinstance(result.exception, DSparkError) and "give 2 to 8" in str(result.exception)
