"""`dspark doctor`: its exit code says whether the model would run, its text says why not."""

import json

import pytest
import typer
from typer.testing import CliRunner

from dspark.cli.doctor import doctor
from dspark.config import DSparkError

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def run(shared_dir):
    model = str(shared_dir / "golden" / "v41_quant" / "model")
    return lambda *flags: CliRunner().invoke(app, [model, *flags])


def test_a_healthy_model_exits_with_zero(run):
    result = run()
    assert result.exit_code == 0
    assert "every tensor accounted for" in result.output


def test_a_refusal_exits_with_one_and_is_said(run):
    result = run("--tensor-parallel-size", "16")
    assert result.exit_code == 1
    assert "tensor_parallel_size 16 does not divide" in result.output


def test_json_is_all_that_stdout_holds(run):
    report = json.loads(run("--json", "--draft", "off").stdout)
    assert report["would_run"] is True
    assert report["draft"] is None


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-cache-dtype", "int8"],
        ["--max-num-seqs", "0"],
        ["--draft", "off", "--num-speculative-tokens", "3"],
    ],
)
def test_nonsense_is_one_sentence(run, flags):
    result = run(*flags)
    assert isinstance(result.exception, DSparkError)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 10**5])
def test_a_config_that_is_no_json_is_one_sentence(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    result = CliRunner().invoke(app, [str(tmp_path / "config.json")])
    assert isinstance(result.exception, DSparkError) and "is not JSON" in str(result.exception)
    assert "\n" not in str(result.exception)
