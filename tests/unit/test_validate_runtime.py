"""The runtime validator: whole engines pass, and each fault that it is there to find is found by the check for it."""

import json

import pytest
from typer.testing import CliRunner

from dspark.cli.app import app
from dspark.engine.graphs import StaticRows
from dspark.ops import places
from dspark.state.row_views import RowView
from dspark.state.views import PassView
from dspark.validate.lifecycle.tiny import TINY_NAMES, write_tiny_checkpoint
from dspark.validate.runtime.run import RuntimeSettings, validate_runtime

SETTINGS = RuntimeSettings(with_graphs=True, num_parts=4, num_requests=3, num_tokens=6)
RAGGED = RuntimeSettings(with_graphs=False, num_parts=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {name: [(name, write_tiny_checkpoint(folder / name, name))] for name in TINY_NAMES}


def failed(report):
    return {probe.name.partition(": ")[2] for probe in report.probes if not probe.is_ok}


@pytest.mark.parametrize("settings", [SETTINGS, RAGGED])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_the_engine_passes(models, name, settings):
    seen = []
    report = validate_runtime(models[name], settings, seen.append)
    assert report.is_ok and seen == report.probes
    assert len(report.probes) == (9 if settings.with_graphs else 5)
    assert all(probe.num_compared > 0 for probe in report.probes)
    assert json.loads(json.dumps(report.as_json()))["is_ok"]
    assert "op by op" in report.launches


def write_padding_into_slot_zero(monkeypatch):
    """Rows of slot -1 go to slot 0."""
    ring_places = places.ring_places
    monkeypatch.setattr(places, "ring_places", lambda slots, *rest: ring_places(slots.clamp(min=0), *rest))


def test_padding_that_writes_is_found(models, monkeypatch):
    write_padding_into_slot_zero(monkeypatch)
    assert "writing its own places only" in failed(validate_runtime(models["own-rows"], SETTINGS))


def test_a_launch_that_keeps_its_first_slots_is_found(models, monkeypatch):
    """As a graph would that had taken the slots of the requests that it was captured with."""
    fill, kept = StaticRows.fill, {}

    def bound(self, num_rows, columns, padding):
        if len(columns) >= 4:
            columns = list(columns)
            columns[2] = kept.setdefault((id(self), num_rows, len(columns[2])), list(columns[2]))
        fill(self, num_rows, columns, padding)

    monkeypatch.setattr(StaticRows, "fill", bound)
    assert "in other slots and pages" in failed(validate_runtime(models["own-rows"], SETTINGS))


@pytest.mark.parametrize(("view", "settings"), [(RowView, SETTINGS), (PassView, RAGGED)])
def test_a_row_that_sees_more_than_its_own_is_found(models, monkeypatch, view, settings):
    """One compressed row too many: what stands there is nobody's."""
    visible = view.visible
    monkeypatch.setattr(view, "visible", lambda self, ratio: visible(self, ratio) + 1)
    assert "beside rows and pages of no numbers" in failed(validate_runtime(models["own-rows"], settings))


def test_the_command(models, tmp_path):
    folder = str(models["own-rows"][0][1])
    sizes = ["--parts", "2", "--no-tiny", "--model", folder]
    whole = ["--graph", "--requests", "2", "--tokens", "4"]
    done = CliRunner().invoke(app, ["validate", "runtime", *whole, *sizes, "--output", str(tmp_path / "r.json")])
    assert done.exit_code == 0, done.output
    assert "no mismatch" in done.stdout and "tokens, drafts, second time" in done.stdout
    assert json.loads((tmp_path / "r.json").read_text())["is_ok"]
    done = CliRunner().invoke(app, ["validate", "runtime", *sizes, "--json"])
    assert json.loads(done.stdout)["settings"]["with_graphs"] is False


@pytest.mark.parametrize(
    "flags",
    [["--parts", "0"], ["--tokens", "-1"], ["--model", "/no/such/folder"], ["--requests", "3"], ["--tokens", "3"]],
)
def test_nonsense_is_refused(flags):
    done = CliRunner().invoke(app, ["validate", "runtime", *flags])
    assert done.exit_code != 0 and done.exception is not None


def test_a_mismatch_ends_with_a_failure(models, monkeypatch):
    write_padding_into_slot_zero(monkeypatch)
    folder = str(models["own-rows"][0][1])
    done = CliRunner().invoke(app, ["validate", "runtime", "--graph", "--parts", "2", "--no-tiny", "--model", folder])
    assert done.exit_code == 1 and "FAILED" in done.stdout
