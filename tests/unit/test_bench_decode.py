"""The decode benchmark on tiny geometries: the shipped engine over random weights. No time is asserted."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import dspark.engine.sizing as sizing
from dspark.bench.decode import run_decode_bench, with_fitting_tables
from dspark.bench.decode_profile import summarise
from dspark.bench.decode_report import PLAIN, ROUNDS, DecodeSettings
from dspark.bench.dummy_weights import dummy_model, with_ops, without_draft
from dspark.bench.geometry import Geometry, read_geometry
from dspark.bench.planned_exchanges import draft_exchanges, target_exchanges
from dspark.cli.app import app
from dspark.config.errors import DSparkError
from dspark.engine.graphs import GraphPlan
from dspark.layers.linear import LinearGroup
from dspark.models.model_bytes import held_bytes, planned_bytes
from dspark.models.registry import parse_config
from dspark.ops.library import with_library_products
from dspark.ops.opset import TORCH_OPS
from dspark.ops.packing import Kind, PackedWeight
from dspark.ops.table import StoredTable, TablePlace, table_rows
from support.divisible_models import divisible_config
from support.fake_memory import FakeMemory
from support.tiny_models import tiny_config

SETTINGS = DecodeSettings(requests=(2,), contexts=(9,), steps=2, accepted_len=4.0)
PACKING_OPS = replace(TORCH_OPS, reads_codes=True)


def config_of(family, quantised=False):
    config = tiny_config(family, quantised=quantised)
    (config.get("text_config") or config)["num_attention_heads"] = 4  # whole blocks of scales
    return config


def geometry_of(family, quantised=False):
    return Geometry(family, parse_config(config_of(family, quantised)))


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_rounds_beside_plain_decoding(family):
    seen = []
    report = run_decode_bench(geometry_of(family), SETTINGS, seen.append)
    assert seen == list(report.figures)
    plain, rounds = report.figures
    assert (plain.mode, rounds.mode) == (PLAIN, ROUNDS)
    assert plain.tokens == 2 and rounds.tokens == 8, "two requests, four tokens a round each"
    assert plain.phases.draft == 0 and rounds.phases.draft > 0
    assert all(f.phases.target > 0 and f.phases.sampling > 0 and f.phases.host > 0 for f in report.figures)
    assert 1 <= plain.experts[0] <= 5 and plain.experts[1] is None and rounds.experts[1] >= 1
    assert plain.floor_ms is None, "a floor needs the bandwidth of an accelerator"
    read = json.loads(json.dumps(report.as_json()))
    assert read["figures"][1]["accepted_len"] == 4.0 and read["figures"][1]["gain"] > 0


def test_two_ranks(tmp_path):
    """Sums of two halves a layer, and one exchange where logits are computed."""
    plan = parse_config(divisible_config("v4"))
    plain, rounds = run_decode_bench(Geometry("v4", plan), replace(SETTINGS, ranks=2)).figures
    assert plain.tokens == 2 and rounds.tokens == 8
    assert (plain.collectives.sums, plain.collectives.gathers) == (2 * len(plan.layers), 1)
    stages = len(plan.draft.stages)
    assert (rounds.collectives.sums, rounds.collectives.gathers) == (2 * (len(plan.layers) + stages), 2)
    assert rounds.collectives.num_bytes > 0 and rounds.collectives.ms is None
    planned = target_exchanges(plan, 2, 12) + draft_exchanges(plan, 2, 10)
    assert (planned.sums, planned.gathers) == (rounds.collectives.sums, rounds.collectives.gathers)


def test_passes_of_fixed_shape_are_stamped(monkeypatch):
    """As with graphs, whose launches run as they are on a CPU."""
    rows = (1, 2, 3, 6, 12)
    plan = lambda config, *rest: None if config.enforce_eager else GraphPlan(rows, rest[-1], is_captured=False)  # noqa: E731
    monkeypatch.setattr(sizing, "plan_graphs", plan)
    rounds = run_decode_bench(geometry_of("v4"), SETTINGS).figures[1]
    assert rounds.phases.target > 0 and rounds.phases.draft > 0 and rounds.tokens == 8


def test_contexts_and_products_stand_side_by_side():
    settings = replace(SETTINGS, contexts=(5, 9), exactness=("exact", "fast"), accepted_len=None)
    report = run_decode_bench(geometry_of("v41"), settings)
    labels = [(figure.label, figure.context) for figure in report.figures]
    assert labels[:4] == [("plain", 5), ("DSpark", 5), ("plain fast", 5), ("DSpark fast", 5)]
    assert {context for _, context in labels[4:]} == {9}
    exact, fast = report.figures[1], report.figures[3]
    assert report.cost_of_exactness(exact) == exact.step_ms / fast.step_ms - 1
    assert report.cost_of_exactness(fast) is None
    assert report.gain(fast) == fast.tokens_per_second / report.figures[2].tokens_per_second
    assert 2 <= exact.tokens <= 12, "what the target accepts"


def test_weights_that_overflow_are_refused(monkeypatch):
    numbers = dummy_model

    def overflowing(*arguments, **options):
        model = numbers(*arguments, **options)
        model.target.head.weight.fill_(float("inf"))
        return model

    monkeypatch.setattr("dspark.bench.decode.dummy_model", overflowing)
    with pytest.raises(DSparkError, match="no numbers"):
        run_decode_bench(geometry_of("v4"), SETTINGS)


def test_kernels_that_overlap_are_busy_once():
    copy = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tensor)::{lambda()}>"
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>"
    spans = [
        ("_attend", 0.0, 10.0),
        ("_attend", 5.0, 12.0),
        (copy, 20.0, 22.0),
        (f"{copy} 2", 30.0, 31.0),
        (add, 40, 41),
    ]
    found = summarise(spans, 2, 1.0)
    assert found.window_ms == 41 / 2e3 and found.idle_share == 1 - 16 / 41
    assert found.busy_ms == (12 + 2 + 1 + 1) / 2e3 and found.kernels_ms == (17 + 3 + 1) / 2e3
    assert [(kernel.name, kernel.launches) for kernel in found.kernels] == [
        ("_attend", 1.0),
        ("torch direct_copy", 1.0),
        ("torch CUDAFunctor_add", 0.5),
    ]
    with pytest.raises(RuntimeError):
        summarise([], 1, 1.0)


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_weights_have_the_forms_that_products_read(family):
    plan = geometry_of(family, quantised=True).plan
    model = dummy_model(plan, PACKING_OPS, torch.bfloat16, torch.device("cpu"))
    assert not any(value.is_meta for value in (*model.parameters(), *model.buffers()))
    layer = model.target.layers[0]
    kind = Kind.FP4 if plan.quant.experts == "fp4_group" else Kind.FP8
    assert layer.ffn.experts.w13.kind is kind
    assert layer.ffn.experts.w13.shape == (
        plan.layers[0].moe.num_experts,
        2 * plan.layers[0].moe.inner_size,
        plan.hidden_size,
    )
    assert layer.attn.wq_a.weight.kind is Kind.FP8
    assert model.target.head.weight.dtype == layer.ffn.gate.weight.dtype == torch.bfloat16
    assert model.target.embed.weight.dtype == torch.float32


@pytest.mark.parametrize("place", [TablePlace.DEVICE, TablePlace.MAPPED])
def test_engram_tables_have_their_storage_form(place):
    plan = geometry_of("v41", quantised=True).plan
    model = dummy_model(plan, PACKING_OPS, torch.bfloat16, torch.device("cpu"), engram_tables=place)
    tables = [layer.engram.embed.weight for layer in model.target.layers if layer.engram is not None]
    assert tables and all(isinstance(table, StoredTable) and table.place is place for table in tables)
    rows = table_rows(tables[0], torch.arange(tables[0].shape[0]))
    assert rows.isfinite().all() and 0.3 < rows.std() < 3


def test_the_same_weights_serve_plain_decoding():
    plan = geometry_of("v41").plan
    model = dummy_model(plan, TORCH_OPS, torch.float32, torch.device("cpu"))
    plain = without_draft(model)
    assert plain.draft is None and not plain.target.captured
    pairs = zip(plain.target.parameters(), model.target.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    assert plain.target.token_map is model.target.token_map


def test_the_same_weights_serve_other_ops():
    """Weights that products read as they are stored, joined ones among them, are shared too."""
    model = dummy_model(geometry_of("v41", quantised=True).plan, PACKING_OPS, torch.bfloat16, torch.device("cpu"))
    other = with_ops(model, with_library_products(PACKING_OPS))
    assert {id(value) for value in weights_of(model)} == {id(value) for value in weights_of(other)}
    assert other.target.layers[0].attn.ops.name.endswith("library products")


def weights_of(model):
    for module in model.modules():
        yield from module.parameters(recurse=False)
        for value in vars(module).values():
            if isinstance(value, PackedWeight):
                yield value
            elif isinstance(value, LinearGroup):
                yield from () if value.joined is None else (value.joined,)


@pytest.mark.parametrize("ops", [TORCH_OPS, PACKING_OPS])
def test_the_memory_is_known_before(ops):
    """At widths of whole tiles the estimate is that of the weights that are made."""
    config = config_of("v4", quantised=True)
    config |= {"hidden_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128}
    config |= {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}
    plan = parse_config(config)
    model = dummy_model(plan, ops, torch.float32, torch.device("cpu"))
    assert planned_bytes(plan, ops) == pytest.approx(held_bytes(model), rel=0.1)


def test_the_command(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "tiny.json").write_text(json.dumps(config_of("v41")))
    files = {name: tmp_path / name for name in ("out.json", "out.png")}
    options = ["--geometry", str(tmp_path / "tiny.json"), "--requests", "1", "--context", "8", "--steps", "2"]
    more = ["--json", str(files["out.json"]), "--plot", str(files["out.png"]), "--engram-rows", "64", "--profile"]
    done = CliRunner().invoke(app, ["bench", "decode", *options, *more, "--dummy-weights"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(files["out.json"].read_text())
    assert report["cuts"] == ["Engram table of layer 1: 64 of 184 rows"]
    assert files["out.png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", "16", "--layers", "12"], "does not divide"),
        (["--requests", "0"], "whole numbers"),
        (["--layers", "2"], "can be cut to 3"),
        (["--steps", "0"], "--steps is 0"),
        (["--engram-rows", "none"], "--engram-rows is"),
        (["--engram-rows", "9" * 5000], "--engram-rows is"),
        (["--spec-decode-acceptance-length", "7"], "7"),
        (["--spec-decode-acceptance-length", "1e9"], "is above 6"),
        (["--draft", "off", "--spec-decode-acceptance-length", "3"], "--draft off"),
        (["--draft", "off", "--acceptance", "measured"], "--draft off"),
        (["--context", "2000000"], "positions"),
        (["--context", "512,x"], "whole numbers"),
        (["--exactness", "exact,quick"], "--exactness is"),
        (["--acceptance", "measured", "--spec-decode-acceptance-length", "4"], "contradict"),
    ],
)
def test_refusals(options, words):
    done = CliRunner().invoke(app, ["bench", "decode", "--geometry", "v4-flash", *options])
    assert isinstance(done.exception, DSparkError) and words in str(done.exception)


def test_flags_of_tables_that_are_not_there_are_told(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(config_of("v4")))
    options = ["--geometry", str(tmp_path / "tiny.json"), "--requests", "1", "--context", "8", "--steps", "1"]
    flags = ["--draft", "off", "--engram-rows", "fit", "--engram-tables", "mapped"]
    done = CliRunner().invoke(app, ["bench", "decode", *options, *flags])
    assert done.exit_code == 0, done.output
    assert "--engram-rows has no effect" in done.output and "--engram-tables has no effect" in done.output


def test_engram_tables_are_cut_to_what_memory_holds(monkeypatch):
    """One table of 384 million rows of 256 float32 values, in what memory leaves beside weights and workspaces."""
    memory = FakeMemory(400 * 2**30, margin=2**30)
    monkeypatch.setattr("dspark.bench.decode_memory.memory_of", lambda *place: memory)
    whole = read_geometry("v41-flash", 3)
    settings = DecodeSettings(requests=(1,), engram_tables="device")
    cut = with_fitting_tables(whole, settings)
    table = cut.plan.layers[1].engram
    others = planned_bytes(whole.plan, TORCH_OPS, TablePlace.PINNED)
    held = table.num_rows * 256 * 4 + others
    assert 390 * 2**30 < held < 391 * 2**30
    assert cut.cuts[-1].startswith("Engram table of layer 1: ")
    assert with_fitting_tables(read_geometry("v4-flash", 3), settings).cuts == ("3 of 43 layers",)


@pytest.mark.parametrize(
    ("num_gib", "free", "remedy"), [(10, 9, "margin: lower --requests"), (201, 200, "--layers to")]
)
def test_what_does_not_fit_is_refused_with_numbers(monkeypatch, num_gib, free, remedy):
    """Where not one layer fits, fewer of them are no remedy."""
    memory = FakeMemory(num_gib * 2**30, margin=2**30)
    monkeypatch.setattr("dspark.bench.decode_memory.memory_of", lambda *place: memory)
    done = CliRunner().invoke(app, ["bench", "decode", "--geometry", "v4-flash", "--layers", "12"])
    assert isinstance(done.exception, DSparkError)
    assert f"{free} GiB are free" in str(done.exception) and remedy in str(done.exception)
