"""Settings of the server and speculative settings as JSON: each wrong one is refused by name."""

import sys

import pytest

from dspark.cli import app as app_module
from dspark.cli import serve as serve_module
from dspark.config import ConfigError, DSparkConfig, SpeculativeConfig
from dspark.config.speculative_json import read_speculative_json
from dspark.serve.run import open_socket
from dspark.serve.settings import ServerSettings

ADAPTIVE = SpeculativeConfig(dspark_config=DSparkConfig(schedule="threshold", draft_confidence_threshold=0.2))


def read(text):
    return read_speculative_json(text, adaptive=ADAPTIVE)


def test_an_empty_object_is_the_default():
    assert read("{}") == ADAPTIVE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"method": "dspark", "num_speculative_tokens": 3}', {"num_speculative_tokens": 3}),
        ('{"model": "elsewhere"}', {"model": "elsewhere"}),
        ('{"enable_adaptive_verification": true}', {}),
        ('{"enable_adaptive_verification": false}', {"dspark_config": DSparkConfig()}),
        ('{"rejection_sample_method": "standard", "draft_tensor_parallel_size": 1}', {}),
        ('{"draft_sample_method": "probabilistic"}', {}),
        (
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}',
            {"spec_decode_acceptance_length": 3.5, "dspark_config": DSparkConfig()},
        ),
        (
            '{"dspark_config": {"schedule": "threshold", "draft_confidence_threshold": 0.5}}',
            {"dspark_config": DSparkConfig(schedule="threshold", draft_confidence_threshold=0.5)},
        ),
    ],
)
def test_keys_of_others_mean_what_they_mean_there(text, expected):
    found = read(text)
    wanted = {"dspark_config": ADAPTIVE.dspark_config, **expected}
    assert found == SpeculativeConfig(**wanted)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON object"),
        ('{"num_speculative_token": 3}', "did you mean num_speculative_tokens?"),
        ('{"method": "eagle"}', "method must be one of"),
        ('{"draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size is 2"),
        ('{"rejection_sample_method": "block"}', "'block' is not offered"),
        ('{"rejection_sample_method": "synthetic"}', "needs synthetic_acceptance_length"),
        ('{"synthetic_acceptance_length": 2}', 'belongs to rejection_sample_method "synthetic"'),
        ('{"synthetic_acceptance_rates": [0.5]}', "synthetic_acceptance_rates is not offered"),
        ('{"draft_sample_method": "greedy"}', "draft_sample_method 'greedy'"),
        ('{"enable_adaptive_verification": 1.5}', "true or false"),
        ('{"enable_adaptive_verification": true, "dspark_config": {}}', "give one of them"),
        ('{"dspark_config": {"schedul": "fixed"}}', "did you mean schedule?"),
        ('{"dspark_config": 3}', "dspark_config must be a JSON object"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(text, words):
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"port": 70_000}, "port"),
        ({"host": ""}, "host"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"request_timeout_s": 0}, "request_timeout"),
        ({"max_body_bytes": 10}, "max_body_bytes"),
        ({"metrics_prefix": "x"}, "metrics_prefix"),
        ({"drain_s": -1}, "drain_seconds"),
        ({"log_level": "loud"}, "log_level"),
        ({"served_model_names": ()}, "served_model_name"),
        ({"api_keys": ("",)}, "API key"),
        ({"api_keys": ("a b",)}, "API key"),
        ({"cors_origins": ("page.example",)}, "cors_origin"),
    ],
)
def test_a_wrong_setting_is_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**fields)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `dspark serve` up to the point where an engine would be built."""
    built = []
    monkeypatch.setattr(serve_module, "AsyncEngine", lambda **options: options)
    monkeypatch.setattr(serve_module, "_run", lambda options, settings: built.append((options, settings)))
    monkeypatch.setattr(serve_module, "_set_up_log", lambda settings: None)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dspark", "serve", *words])
        with pytest.raises(SystemExit) as ended:
            app_module.main()
        return ended.value.code or 0, capsys.readouterr().err, built

    return run


def test_flags_reach_the_engine_and_the_server(run, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("second\n\nthird\n")
    words = "--port 0 --max-num-seqs 3 --max-model-len 128 --no-prefix-caching --api-key first --max-waiting 7"
    code, _, ((config, settings),) = run(
        *words.split(), "--api-key-file", str(keys), "--speculative-config", '{"num_speculative_tokens": 2}'
    )
    assert code == 0
    assert (config["model"], config["draft"], config["max_waiting"]) == (None, "dspark", 7)
    assert (config["max_num_seqs"], config["max_model_len"], config["enable_prefix_caching"]) == (3, 128, False)
    assert config["speculative_config"].num_speculative_tokens == 2
    assert settings.api_keys == ("first", "second", "third")
    assert (settings.port, settings.max_waiting, settings.model_name) == (0, 7, "dspark-embedded")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "off", "--speculative-config", "{}"], "no meaning with --draft off"),
        (["--port", "70000"], "port must be"),
        (["--api-key-file", "missing"], "missing"),
    ],
)
def test_wrong_flags_cost_one_sentence(run, words, message):
    code, err, built = run(*words)
    assert code == 2
    assert message in err
    assert not built


def test_a_missing_package_names_the_extra(run, monkeypatch):
    monkeypatch.setattr(serve_module, "find_spec", lambda name: None if name == "uvicorn" else name)
    code, err, _ = run()
    assert code == 2
    assert "needs uvicorn" in err
    assert "dspark[serve]" in err


def test_an_address_in_use_costs_one_sentence_before_anything_is_loaded(run):
    with open_socket("127.0.0.1", 0) as first:
        first.listen()
        code, err, built = run("--port", str(first.getsockname()[1]))
    assert code == 2
    assert "cannot listen at 127.0.0.1" in err
    assert not built
