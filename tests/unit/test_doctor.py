"""The doctor reads metadata only and accounts for everything: tensors, refusals, and memory by hand-checked sums."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.checkpoint import SafetensorsFolder, write_checkpoint
from dspark.checkpoint.folder import INDEX_NAME
from dspark.config import CheckpointError, Config, ConfigError, DSparkConfig, SpeculativeConfig, admit
from dspark.models.facts import model_facts
from dspark.models.registry import parse_config
from dspark.validate.doctor import NOT_CHECKED, examine
from dspark.validate.doctor_table import closing_lines, format_bytes, opening_lines, tables
from dspark.validate.memory import row_bytes

CASES = ["v41_bf16", "v41_quant", "v4_bf16", "v4_quant"]
DRAFTED = Config(speculative_config=SpeculativeConfig())


@pytest.fixture
def golden(shared_dir):
    return lambda case: shared_dir / "golden" / case / "model"


@pytest.fixture
def released(shared_dir):
    names = {"larger": "deepseek-v4.1-flash.json", "smaller": "deepseek-v4-flash-0731.json"}
    return lambda name: examine(shared_dir / "facts" / "configs" / names[name], DRAFTED)


def text_files(source):
    """What a checkpoint holds beside its tensors."""
    return {name: (source / name).read_bytes() for name in ("config.json", "tokenizer.json")}


def weight_bytes(report, *classes):
    return sum(row.num_bytes for row in report.weights if row.memory_class in classes)


@pytest.mark.parametrize("case", CASES)
def test_a_whole_checkpoint_is_healthy_and_accounted_for(golden, case):
    report = examine(golden(case), DRAFTED)
    with SafetensorsFolder(golden(case)) as source:
        assert report.tensors.found_bytes == source.num_bytes
    skipped = sum(group.num_tensors for group in report.tensors.skipped)
    assert report.is_healthy
    assert report.tensors.num_found == report.tensors.num_expected + skipped
    assert report.speculation == "dspark, 5 draft tokens a round"


@pytest.mark.parametrize("case", CASES)
def test_without_speculation_the_draft_is_skipped_with_a_reason(golden, case):
    drafted, plain = examine(golden(case), DRAFTED), examine(golden(case), Config())
    assert plain.is_healthy
    assert plain.draft is None
    assert plain.speculation == "not running because it is switched off"
    assert any(group.reason == "draft stage: speculation is off" for group in plain.tensors.skipped)
    assert sum(row.num_bytes for row in drafted.weights if row.is_draft) == drafted.draft.weight_bytes
    assert plain.state.request_bytes == (
        drafted.state.request_bytes - drafted.draft.window_bytes - drafted.draft.slack_bytes
    )


def test_memory_of_the_larger_release(released):
    """40 + 3 windows of 512 bf16 values, 133 rows, 6 for a round ahead and 63 for images; published weight sums."""
    report = released("larger")
    rings = {(ring.name, ring.num_rows): ring for ring in report.state.rings}
    assert rings["windows", 139 + 63].num_bytes == 40 * 202 * 512 * 2
    assert rings["draft windows", 139 + 63].num_bytes == 3 * 202 * 512 * 2
    assert rings["open groups", 2 + 11 + 63].num_bytes == 3 * 76 * 2 * 512 * 4
    assert report.state.bytes_per_token == (3 / 2 + 1) * (1024 + 132)
    assert report.state.page_bytes == report.state.page_tokens * report.state.bytes_per_token
    assert report.draft.slack_bytes == 40 * 10 * 1024 + 3 * 10 * 4096
    assert round(weight_bytes(report, "routed experts") / 1e9) == 289
    assert round(weight_bytes(report, "engram tables") / 1e9) == 203
    assert round(report.draft.weight_bytes / 1e9, 1) == 7.9
    assert report.tensors.status == NOT_CHECKED


def test_memory_of_the_smaller_release(released):
    """Overlapping groups of 4 keep 8 rows, plain groups of 128 keep 128; each with 11 for drafts and 127 for images."""
    report = released("smaller")
    rings = {(ring.name, ring.num_rows): ring for ring in report.state.rings}
    assert rings["windows", 139 + 127].num_bytes == 43 * 266 * 1024
    assert rings["open groups", 8 + 11 + 127].num_rings == 2 * 21
    assert rings["open groups", 128 + 11 + 127].num_rings == 20
    assert report.state.bytes_per_token == 21 / 4 * (1024 + 132) + 20 / 128 * 1024
    assert round(report.draft.weight_bytes / 1e9, 1) == 10.9
    assert report.tensors.expected_bytes == 166_878_536_440


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("is_whole", [False, True])
def test_both_releases_divide_over_up_to_eight_ranks(shared_dir, size, is_whole):
    config = replace(DRAFTED, tensor_parallel_size=size, enable_expert_parallel=is_whole)
    for file in (shared_dir / "facts" / "configs").glob("*.json"):
        assert admit(config, model_facts(parse_config(json.loads(file.read_text())))).is_admitted


def test_sixteen_ranks_are_refused_by_the_output_groups(shared_dir):
    file = shared_dir / "facts" / "configs" / "deepseek-v4.1-flash.json"
    report = examine(file, replace(DRAFTED, tensor_parallel_size=16))
    assert "output groups 8" in report.refusals[0]


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 256), ("fp8", 132), ("fp4", 68), ("fp32", 512)])
def test_bytes_of_a_row_of_128_values(dtype, size):
    assert row_bytes(128, dtype) == size


def test_cache_dtypes_are_respected(golden):
    def per_token(**dtypes):
        return examine(golden("v41_bf16"), replace(DRAFTED, **dtypes)).state

    base = per_token()
    assert per_token(kv_cache_dtype="fp32").request_bytes > base.request_bytes
    assert per_token(index_cache_dtype="fp4").bytes_per_token < base.bytes_per_token
    assert per_token(index_cache_dtype="bf16").bytes_per_token > base.bytes_per_token


def test_a_broken_checkpoint_is_a_finding_not_a_crash(golden, tmp_path):
    folder = shutil.copytree(golden("v41_quant"), tmp_path / "m", copy_function=shutil.copyfile)
    folder.chmod(0o755)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    report = examine(folder, DRAFTED)
    assert not report.is_healthy
    assert "truncated" in report.tensors.fault
    assert report.weights


def test_a_missing_draft_tensor_is_named(golden, tmp_path):
    source = golden("v4_bf16")
    with SafetensorsFolder(source) as full:
        kept = [(name, full.read(name)) for name in full.entries if name != "mtp.1.ffn.shared_experts.w2.weight"]
    folder = write_checkpoint(tmp_path / "m", kept, files=text_files(source))
    report = examine(folder, DRAFTED)
    assert "1 missing: mtp.1.ffn.shared_experts.w2.weight" in report.tensors.fault
    assert examine(folder, Config()).is_healthy


def test_an_index_without_shards_is_a_fault_and_a_bare_config_is_not(golden, tmp_path):
    (tmp_path / "config.json").write_bytes((golden("v4_bf16") / "config.json").read_bytes())
    assert examine(tmp_path, DRAFTED).tensors.status == NOT_CHECKED
    (tmp_path / INDEX_NAME).write_bytes((golden("v4_bf16") / INDEX_NAME).read_bytes())
    assert "missing shard" in examine(tmp_path, DRAFTED).tensors.fault


def test_oddities_are_remarked_and_harm_nothing(golden, tmp_path):
    source = golden("v4_bf16")
    with SafetensorsFolder(source) as full:
        tensors = [(name, full.read(name)) for name in full.entries]
    folder = write_checkpoint(tmp_path / "m", tensors, files=text_files(source))
    index = json.loads((folder / INDEX_NAME).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX_NAME).write_text(json.dumps(index))
    (folder / "consolidated.safetensors").write_bytes(b"")
    report = examine(folder, DRAFTED)
    assert report.is_healthy
    assert [remark.split(" ")[1] for remark in report.tensors.remarks] == ["index", "that"]


def test_padded_rows_are_counted_and_a_tokenizer_of_another_model_is_refused(golden, tmp_path):
    source = golden("v4_bf16")
    report = examine(source, DRAFTED)
    assert report.vocabulary.num_padded >= 0
    settings = json.loads((source / "config.json").read_text()) | {"vocab_size": 10, "dspark_noise_token_id": 9}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    assert "only 10 rows" in examine(tmp_path, DRAFTED).refusals[-1]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        examine(tmp_path, DRAFTED)


def test_why_speculation_does_not_run_is_said(golden):
    wide = replace(DRAFTED, speculative_config=SpeculativeConfig(num_speculative_tokens=9))
    assert "not running because num_speculative_tokens 9" in examine(golden("v4_bf16"), wide).speculation
    scheduled = SpeculativeConfig(dspark_config=DSparkConfig(schedule="throughput"))
    report = examine(golden("v4_bf16"), replace(DRAFTED, speculative_config=scheduled))
    assert "calibration_profile" in report.speculation
    assert not report.is_healthy


def test_a_model_without_draft_stages(golden, tmp_path):
    settings = json.loads((golden("v4_bf16") / "config.json").read_text())
    settings["compress_ratios"] = settings["compress_ratios"][: settings["num_hidden_layers"]]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert not examine(tmp_path, DRAFTED).is_healthy
    lenient = examine(tmp_path, DRAFTED, is_draft_optional=True)
    assert lenient.is_healthy
    assert "carries no draft stages" in lenient.speculation


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_a_config_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        examine(tmp_path, DRAFTED)


def test_unknown_models_and_missing_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        examine(tmp_path / "nowhere", DRAFTED)
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ConfigError, match="other"):
        examine(tmp_path, DRAFTED)


@pytest.mark.parametrize("case", CASES)
def test_the_report_can_be_read_by_people_and_programs(golden, case):
    report = examine(golden(case), DRAFTED, name="a model")
    plain = json.loads(json.dumps(report.as_json()))
    assert plain["would_run"] is True
    assert plain["weight_bytes"] == report.tensors.expected_bytes
    assert plain["draft"]["window_bytes"] == report.draft.window_bytes
    lines = opening_lines(report) + closing_lines(report)
    assert lines[0].startswith("a model: ")
    assert any(line.startswith("the draft adds: ") for line in lines)
    assert [len(table.columns) for table in tables(report)] == [4, 5, 5]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_234_567, "1.23 MB"), (509.3e9, "509 GB")]
)
def test_sizes_have_three_digits(size, text):
    assert format_bytes(size) == text


def test_only_metadata_is_read(golden, monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsFolder, "read", refuse)
    assert examine(Path(golden("v41_quant")), DRAFTED).is_healthy
