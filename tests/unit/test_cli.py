"""The command line on an engine of straw: what is printed where, exit codes, and one sentence for each mistake."""

import errno
import json
import subprocess
import sys

import pytest

from dspark.cli import app as app_module
from dspark.cli import bench as bench_module
from dspark.cli import session
from dspark.cli.bench_inputs import check_outputs
from dspark.cli.files import write_whole
from dspark.config.errors import DSparkError
from dspark.version import __version__
from support.fake_engine import BOS, FakeLLM

PLAIN = {"accepted": 0, "speculation_status": "not running because drafts are off"}


@pytest.fixture
def engines(monkeypatch):
    """Engines by draft mode; a test may replace them before it runs a command."""
    fakes = {"dspark": FakeLLM(), "off": FakeLLM(**PLAIN)}
    monkeypatch.setattr(session, "LLM", lambda model, draft: fakes[draft])
    return fakes


@pytest.fixture
def run(engines, monkeypatch, capsys):
    """Run a command; returns its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dspark", *words])
        with pytest.raises(SystemExit) as ended:
            app_module.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


def interrupt_after(num_tokens):
    def check(emitted):
        if emitted >= num_tokens:
            raise KeyboardInterrupt

    return check


def test_the_package_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "dspark", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dspark {__version__}\n"


def test_text_goes_to_stdout_and_its_summary_to_stderr(run):
    code, out, err = run("generate", "once, ")
    assert (code, out) == (0, "once, the quick brown fox\n")
    assert "19 tokens" in err
    assert "tokens/s" in err


def test_json_names_the_origin_of_every_token(run):
    code, out, _ = run("generate", "--json", "--max-tokens", "6", "once, ")
    report = json.loads(out)
    assert code == 0
    assert report["text"] == "the qu"
    assert report["origins"] == [False, True, True, True, False, False]
    assert report["speculation"] == "running"
    assert report["sampling"]["max_tokens"] == 6


def test_compare_accepts_equal_tokens(run):
    code, _, err = run("generate", "--compare", "x")
    assert code == 0
    assert "all 19 tokens are identical" in err


def test_compare_fails_on_one_different_token(run, engines):
    engines["off"] = FakeLLM(text="the quick brown dog", **PLAIN)
    code, _, err = run("generate", "--compare", "x")
    assert code == 1
    assert "first at token 16" in err


def test_compare_json_holds_both_runs(run):
    code, out, _ = run("generate", "--compare", "--json", "x")
    comparison = json.loads(out)["compare"]
    assert code == 0
    assert comparison["first_difference"] is None
    assert comparison["plain"]["token_ids"]


def test_compare_refuses_to_compare_plain_with_plain(run, engines):
    engines["dspark"] = FakeLLM(**PLAIN)
    code, _, err = run("generate", "--compare", "x")
    assert code == 2
    assert "not running because drafts are off" in err


def test_speculation_that_does_not_run_is_said(run, engines):
    engines["dspark"] = FakeLLM(**PLAIN)
    code, _, err = run("generate", "x")
    assert code == 0
    assert "speculation is not running because drafts are off" in err


def test_interrupt_prints_the_summary_so_far(run, engines):
    engines["dspark"] = FakeLLM(before_emission=interrupt_after(5))
    code, out, err = run("generate", "x ")
    assert (code, out) == (130, "x the q\n")
    assert "5 tokens" in err
    assert "interrupted" in err


def test_output_that_cannot_be_written_is_one_sentence(run, monkeypatch):
    def refuse(_text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(app_module, "_give_up_stdout", lambda: None)
    monkeypatch.setattr("dspark.cli.token_text.TokenText.show", lambda self, emission: refuse(emission))
    code, _, err = run("generate", "x")
    assert code == 1
    assert "error: the output cannot be read or written: No space left on device" in err


def test_a_stop_string_that_is_no_text_is_refused(run):
    code, _, err = run("generate", "x", "--stop", "\udcff")
    assert code == 2
    assert "--stop is not valid UTF-8: byte 0xff" in err


def test_interrupt_before_the_first_token(run, engines):
    engines["dspark"] = FakeLLM(before_emission=interrupt_after(0))
    code, _, err = run("generate", "x")
    assert code == 130
    assert "0 tokens" in err


def reports_to(path):
    """Long commands that write a report there; it is refused before the work, not after."""
    return [
        ["validate", "runtime", "--output", path],
        ["validate", "lifecycle", "--output", path],
        ["bench", "decode", "--geometry", "v4-flash", "--json", path],
        ["bench", "soak", "--json", path],
        ["bench", "serve", "--json", path],
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["generate", "--no-such-flag"], "--no-such-flag"),
        (["generate", "--max-tokens", "many", "x"], "--max-tokens"),
        (["generate", "--draft", "magic", "x"], "--draft"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "  \n"], "the prompt is empty"),
        (["generate", "bad \udcff"], "not valid UTF-8: byte 0xff at offset 4"),
        (["generate", "--prompt-file", "gone.txt"], "gone.txt cannot be read"),
        (["generate", "--prompt-file", "gone.txt", "x"], "both given"),
        (["generate", "--model", "no/such/model", "x"], "no/such/model does not exist"),
        (["generate", "--top-p", "2", "x"], "top_p"),
        (["generate", "--max-tokens", "-1", "x"], "max_tokens"),
        (["generate", "--stop", "", "x"], "stop"),
        (["generate", "--compare", "--draft", "off", "x"], "leave out --draft off"),
        (["nonsense"], "nonsense"),
        (["validate", "runtime", "--tensor-parallel-size", "0"], "tensor_parallel_size must be at least 1"),
        (["validate", "lifecycle", "--tensor-parallel-size", "-2"], "tensor_parallel_size must be at least 1"),
        (["bench", "generate", "--domain", "poetry"], "poetry"),
        (["bench", "generate", "--prompts", "0"], "not 0"),
        (["bench", "generate", "--repeats", "0"], "and 0"),
        (["bench", "generate", "--plot", "picture.jpg"], "picture.jpg"),
        (["bench", "generate", "--plot", "no/such/folder/a.png"], "no/such/folder"),
        *((words, "the folder no/such does not exist") for words in reports_to("no/such/report.json")),
        *((words, "cannot write to /: it is a folder") for words in reports_to("/")),
    ],
)
def test_a_mistake_costs_one_sentence_and_exit_code_2(run, words, reason):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert reason in err
    assert "Traceback" not in err


def test_files_of_reports_do_not_overwrite_each_other(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(DSparkError, match="both name"):
        check_outputs(tmp_path / "a.png", tmp_path / "a.png")


def test_a_path_that_became_a_folder_is_one_sentence(tmp_path):
    with pytest.raises(DSparkError, match=f"{tmp_path} cannot be written: Is a directory"):
        write_whole(tmp_path, b"x")
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_a_model_that_is_a_file_is_refused(run, tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    code, _, err = run("generate", "--model", str(file), "x")
    assert code == 2
    assert "is a file, not a folder" in err


def test_prompt_file_is_read_whole(run, engines, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("zwei\nZeilen ä\n", encoding="utf-8")
    assert run("generate", "--prompt-file", str(file))[0] == 0
    assert engines["dspark"].prompts == [[BOS, *"zwei\nZeilen ä\n".encode()]]


def test_prompt_file_with_invalid_bytes_is_refused(run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"good \xc3(")
    code, _, err = run("generate", "--prompt-file", str(file))
    assert code == 2
    assert "byte 0xc3 at offset 5" in err


def test_version(run):
    assert run("--version")[:2] == (0, "dspark 0.1.0\n")


def test_bench_prints_tables_and_json(run):
    code, out, _ = run("bench", "generate", "--domain", "code", "--prompts", "2", "--max-tokens", "8")
    assert code == 0
    assert "all 16 identical" in out
    code, out, _ = run("bench", "generate", "--prompts", "1", "--max-tokens", "8", "--json")
    report = json.loads(out)
    assert code == 0
    assert [row["name"] for row in report["domains"]] == ["code", "docs", "math", "prose", "chat"]


def test_bench_fails_when_a_token_differs(run, engines):
    engines["off"] = FakeLLM(text="the quick red fox", **PLAIN)
    code, out, _ = run("bench", "generate", "--domain", "code", "--prompts", "1")
    assert code == 1
    assert "DIFFER (code-1 at token 10)" in out


def test_bench_writes_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "speed.png"
    assert run("bench", "generate", "--domain", "math", "--prompts", "1", "--plot", str(file))[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["speed.png"]


def test_bench_without_matplotlib_says_how_to_get_it(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("bench", "generate", "--plot", str(tmp_path / "a.png"))
    assert code == 2
    assert "dspark[plot]" in err


def test_bench_interrupted_reports_what_was_finished(run, monkeypatch):
    measured = []
    original = bench_module.run_generate_bench

    def interrupted(*arguments, on_prompt, **settings):
        def count(measurement):
            measured.append(measurement)
            if len(measured) == 2:
                raise KeyboardInterrupt

        return original(*arguments, on_prompt=count, **settings)

    monkeypatch.setattr(bench_module, "run_generate_bench", interrupted)
    code, out, err = run("bench", "generate", "--domain", "code", "--max-tokens", "8")
    assert code == 130
    assert "interrupted after 2 prompts" in err
    assert "all 16 identical" in out
