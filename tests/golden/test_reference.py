"""Both families reproduce the reference's numbers in fp32, and what survives rounding in bf16.

Every folder under the shared golden data is a case; the damaged copies prove that a miss is found and reported.
"""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.cli import main
from dspark.config.errors import DSparkError
from dspark.validate.golden import validate_case

CASES = ["v41_bf16", "v41_quant", "v4_bf16", "v4_quant"]


@pytest.fixture
def damaged(shared_dir, tmp_path):
    """A copy of a case with some of the reference's tensors changed."""

    def damage(case, changes, file="io_f32.safetensors"):
        folder = tmp_path / case
        shutil.copytree(shared_dir / "golden" / case, folder, copy_function=shutil.copyfile)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        tensors = load_file(folder / file)
        tensors.update({name: change(tensors[name]) for name, change in changes.items()})
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
        for short in folder.glob("io_short*"):
            short.unlink()
        return folder

    return damage


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_case_is_reproduced(shared_dir, case, dtype):
    report = validate_case(shared_dir / "golden" / case, (dtype,))
    assert [check for check in report.checks if not check.is_ok] == []
    quantities = {check.quantity for check in report.checks}
    assert {"prefill_logits", "decode_logits", "main_hidden_decode", "draft_logits", "draft_ids"} <= quantities
    assert {"confidence", "greedy_ids"} <= quantities
    assert ("engram_hash_ids" in quantities) == case.startswith("v41")


@pytest.mark.parametrize(
    ("quantity", "change"),
    [
        ("prefill_logits", lambda t: t + 0.01 * (torch.arange(len(t)) == 3).unsqueeze(-1)),
        ("decode_logits", lambda t: t.flip(0)),
        ("main_hidden_decode", lambda t: t * 1.01),
        ("draft_logits", lambda t: t + 0.006),
        ("confidence", lambda t: -t),
        ("draft_ids", lambda t: t + 1),
        ("main_hidden_prefill", lambda t: t[:, :-1]),
    ],
)
def test_a_wrong_number_is_a_miss(damaged, quantity, change):
    report = validate_case(damaged("v41_bf16", {quantity: change}), ("fp32",))
    assert quantity in {check.quantity for check in report.checks if not check.is_ok}
    assert not report.is_ok


def test_a_wrong_hash_is_a_miss(damaged):
    folder = damaged("v41_bf16", {"engram_hash_ids": lambda t: t + 1}, file="io.safetensors")
    report = validate_case(folder, ("fp32",))
    assert [check.quantity for check in report.checks if not check.is_ok] == ["engram_hash_ids"]


def test_a_wrong_draft_is_a_miss_in_bf16(damaged):
    folder = damaged("v4_bf16", {"draft_ids": lambda t: t + 1, "decode_logits": lambda t: -t})
    missed = {check.quantity for check in validate_case(folder, ("bf16",)).checks if not check.is_ok}
    assert {"draft_ids", "decode_logits", "argmax"} <= missed


@pytest.mark.parametrize("gone", ["model", "io_f32.safetensors"])
def test_an_incomplete_folder_is_refused(damaged, gone):
    folder = damaged("v4_bf16", {})
    path = folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DSparkError, match="no golden case"):
        validate_case(folder)


def test_a_truncated_reference_is_refused(damaged):
    folder = damaged("v4_bf16", {})
    file = folder / "io_f32.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DSparkError, match="cannot be read"):
        validate_case(folder)


def test_the_command_prints_errors_and_fails_on_a_miss(shared_dir, damaged, monkeypatch, capsys):
    good, bad = str(shared_dir / "golden" / "v4_bf16"), str(damaged("v4_quant", {"confidence": lambda t: t + 1}))
    monkeypatch.setattr(sys, "argv", ["dspark", "validate", "golden", good, bad, "--dtype", "fp32", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert "1 of 2 cases miss the reference: v4_quant" in printed.err
    assert [report["ok"] for report in json.loads(printed.out)] == [True, False]
