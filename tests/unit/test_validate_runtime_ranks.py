"""The runtime validator with ranks: each plays the same requests and compares its own rows."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dspark.cli.app import app
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint
from dspark.validate.runtime.run import RuntimeSettings, validate_runtime
from support import rank_calls

NAME = TINY_NAMES[0]
FIXED = RuntimeSettings(with_graphs=True, num_parts=3, num_requests=2, num_tokens=5)
RAGGED = RuntimeSettings(with_graphs=False, num_parts=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [(NAME, write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / NAME, NAME, ranks=2))]


@pytest.mark.parametrize("settings", [FIXED, RAGGED])
def test_two_ranks_pass(models, settings):
    alone = validate_runtime(models, settings)
    report = validate_runtime(models, replace(settings, num_ranks=2))
    assert report.is_ok and "on 2 ranks" in report.launches
    for one, both in zip(alone.probes, report.probes, strict=True):
        assert both.name == one.name
        assert both.num_compared == one.num_compared * (1 if "tokens" in one.name else 2)


def test_a_fault_of_one_rank_is_found_and_named(models, monkeypatch):
    """A report of every rank becomes one line a check."""
    monkeypatch.setattr("dspark.validate.runtime.run._found_on_part", rank_calls.found_on_one_rank)
    report = validate_runtime(models, replace(RAGGED, num_ranks=2))
    assert [(probe.is_ok, probe.num_compared, probe.message) for probe in report.probes] == [
        (False, 6, "rank 1: 1 rows differ")
    ]


def test_ranks_cannot_divide_the_embedded_model():
    done = CliRunner().invoke(app, ["validate", "runtime", "--no-tiny", "--tensor-parallel-size", "2"])
    assert done.exit_code != 0 and "give another one by --model" in str(done.exception)
