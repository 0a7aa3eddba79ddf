"""Least times by plan: the floors that were worked out by hand for the released geometries, and their parts."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dspark.bench.geometry import geometry_names, read_geometry
from dspark.bench.roofline import Load, Roofline, compute_bound_rows, expected_experts, roofline_rows
from dspark.cli.app import app
from dspark.config.errors import DSparkError

# Milliseconds at 4.3 TB/s, 8k tokens, by rows of a pass; up to six rows belong to one request.
ROWS = (1, 6, 24, 96, 384)
FLOORS = {
    ("v4-flash", 2): (1.46, 3.33, 8.51, 16.5, 18.6),
    ("v4-flash", 4): (0.88, 1.82, 4.42, 8.46, 9.67),
    ("v41-flash", 4): (0.90, 2.15, 5.95, 13.9, 18.0),
}


def load_of(num_rows, context=8192):
    requests = max(num_rows // 6, 1)
    return Load(requests, num_rows // requests, context)


@pytest.fixture(scope="module")
def models():
    """One for each geometry and number of devices: what a plan's tensors weigh is worked out once."""
    plans = {name: read_geometry(name).plan for name in geometry_names()}
    return {(name, ranks): Roofline(plans[name], ranks) for name, ranks in [*FLOORS, ("v4-flash", 1)]}


@pytest.mark.parametrize(("name", "ranks"), FLOORS)
def test_the_floor_table(models, name, ranks):
    found = [models[name, ranks].target(load_of(rows)).ms() for rows in ROWS]
    assert found == pytest.approx(FLOORS[name, ranks], rel=0.01)


@pytest.mark.parametrize(
    ("experts", "topk", "touched"), [(256, 6, (6, 34, 111, 230, 256)), (384, 6, (6, 35, 121, 299, 383))]
)
def test_distinct_experts(experts, topk, touched):
    assert [round(expected_experts(experts, topk, rows)) for rows in ROWS] == list(touched)


@pytest.mark.parametrize("name", ["v4-flash", "v41-flash"])
def test_the_draft_pass(models, name):
    """Four devices: 0.18 to 0.2 ms at one request, a third or more of it the head; 0.5 to 0.65 at 16."""
    model = models[name, 4]
    one, many = model.draft(Load(1, 5, 8192)), model.draft(Load(16, 5, 8192))
    assert 0.18 <= one.ms() <= 0.2
    assert one.parts["head"] / one.num_bytes > 0.32
    assert 0.5 <= many.ms() <= 0.65


def test_the_valley_of_full_rounds(models):
    """At a few requests six rows touch so many more experts than one that full rounds lose."""
    model = models["v4-flash", 4]
    gains = [row.gain for row in roofline_rows(model, (1, 4, 16, 64), 8192, 3.0)]
    assert gains == pytest.approx([1.32, 0.93, 1.15, 2.25], rel=0.02)


def test_where_products_take_over(models):
    bounds = [compute_bound_rows(models[name, 4], 8192, 4.3e12, 780e12) for name in ("v4-flash", "v41-flash")]
    assert bounds == pytest.approx([1000, 1600], rel=0.1)


def test_bytes_of_a_layer(models):
    """MB of one layer's parts."""
    parts = models["v4-flash", 1].target(Load(1, 1, 1)).parts
    assert parts["attention"] / 43e6 == pytest.approx(107, rel=0.01)
    assert parts["shared expert"] / 43e6 == pytest.approx(25, rel=0.02)
    assert parts["routed experts"] / 43e6 / 6 == pytest.approx(13.4, rel=0.01)


def test_counted_experts_replace_expected_ones(models):
    expected = models["v4-flash", 1].target(Load(1, 6, 512))
    counted = replace(models["v4-flash", 1], distinct={("target", 6): 10.0}).target(Load(1, 6, 512))
    assert counted.experts == 10.0
    assert counted.parts["routed experts"] / expected.parts["routed experts"] == pytest.approx(10 / 33.96, rel=0.01)


def test_a_cut_geometry():
    geometry = read_geometry("v41-flash", 12, 10**6)
    plan = geometry.plan
    assert len(plan.layers) == 12 and plan.draft.target_layer_ids == (9, 10, 11)
    assert [layer.engram.num_rows for layer in plan.layers if layer.engram] == [999_984]
    assert len(geometry.cuts) == 2
    assert plan.ngrams is not None
    assert read_geometry("v41-flash", 3).plan.layers[1].engram is not None


def test_wrong_geometries(tmp_path):
    with pytest.raises(DSparkError, match="no geometry and no file"):
        read_geometry("nothing")
    with pytest.raises(DSparkError, match="can be cut to 3 to 43"):
        read_geometry("v4-flash", 44)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DSparkError, match="not a JSON object"):
        read_geometry(str(tmp_path / "config.json"))
    for cut_short in (b"", b'{"model_type": "deepseek_v4", "voc', b"\xff", b"[" * 10**5):
        (tmp_path / "config.json").write_bytes(cut_short)
        with pytest.raises(DSparkError, match="cannot be read as JSON"):
            read_geometry(str(tmp_path / "config.json"))
    with pytest.raises(DSparkError, match="looks 24 rows up"):
        read_geometry("v41-flash", None, 10)


def test_the_command(tmp_path):
    file = tmp_path / "floors.json"
    done = CliRunner().invoke(app, ["roofline", "--geometry", "v41-flash", "--tp", "4", "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(file.read_text())
    assert [row["requests"] for row in report["rows"]] == [1, 4, 16, 64]
    assert report["rows"][0]["target"]["ms"] == pytest.approx(2.15, rel=0.01)
    exchanges = report["exchanges"][0]["round"]
    assert (exchanges["sums"], exchanges["gathers"]) == (2 * (40 + 3), 2 + 2 + 2), "halves; logits, Engram, rank 0"
    assert "each device: a plain pass sums 80 times" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", "3"], "does not divide"),
        (["--requests", "1,x"], "whole numbers"),
        (["--requests", "9" * 400], "whole numbers"),
        (["--bandwidth-tb-s", "nan"], "--bandwidth-tb-s must be finite"),
        (["--bandwidth-tb-s", "0"], "--bandwidth-tb-s must be greater than 0"),
        (["--peak-tflops", "inf"], "--peak-tflops must be finite"),
        (["--context", "0"], "positions"),
        (["--accepted-len", "7"], "emit 1 to 6"),
    ],
)
def test_refusals(options, words):
    done = CliRunner().invoke(app, ["roofline", "--geometry", "v4-flash", *options])
    assert isinstance(done.exception, DSparkError) and words in str(done.exception)
