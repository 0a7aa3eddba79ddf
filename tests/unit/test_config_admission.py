"""Every rule of admission: what is refused is refused with the offending values and a remedy, and nothing else is."""

import subprocess
import sys
from dataclasses import replace

import pytest

from dspark import CompilationConfig, Config, CUDAGraphMode, DSparkConfig, SpeculativeConfig
from dspark.config import ConfigError, HardwareFacts, ModelFacts, ShardedDimension, admit

FACTS = ModelFacts(
    name="test model",
    max_position_embeddings=8192,
    vocab_size=1000,
    draft_methods=("dspark",),
    draft_block_size=5,
    sharded=(
        ShardedDimension("attention heads", 64),
        ShardedDimension("output groups", 8),
        ShardedDimension("expert width", 2304, unit=32, when="tensor_parallel"),
        ShardedDimension("routed experts", 384, when="expert_parallel"),
    ),
    fingerprint="a" * 64,
)
GPUS = HardwareFacts("cuda", num_devices=4, has_graphs=True)


def speculating(**fields):
    return Config(model="m", speculative_config=SpeculativeConfig(model="m", **fields))


def only_refusal(config, **context):
    refusals = admit(config, context.pop("facts", FACTS), **context).refusals
    assert len(refusals) == 1, refusals
    return refusals[0]


def test_the_documented_configuration_runs_as_it_stands():
    config = Config(
        model="m",
        tensor_parallel_size=4,
        enable_expert_parallel=True,
        kv_cache_dtype="bf16",
        index_cache_dtype="fp8",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len=4096,
        enforce_eager=True,
        compilation_config=CompilationConfig(level=0),
        speculative_config=SpeculativeConfig(method="dspark", model="m", num_speculative_tokens=5),
    )
    assert config.validated(FACTS, hardware=GPUS).notes == ()
    assert config.draft_width(FACTS) == 5


def test_importing_the_package_loads_no_torch():
    code = "import sys, dspark; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("experts", [False, True])
def test_parallel_sizes_that_divide_are_admitted(size, experts):
    config = replace(speculating(), tensor_parallel_size=size, enable_expert_parallel=experts)
    assert admit(config, FACTS).is_admitted


def test_one_rank_divides_nothing():
    odd = replace(FACTS, sharded=(ShardedDimension("expert width", 48, unit=32),))
    assert admit(Config(), odd).is_admitted
    assert "use 1." in admit(Config(tensor_parallel_size=2), odd).refusals[0]


@pytest.mark.parametrize(
    ("size", "named"), [(3, "attention heads 64"), (16, "output groups 8"), (5, "expert width 2304")]
)
def test_a_parallel_size_that_does_not_divide_is_refused(size, named):
    sentence = only_refusal(replace(speculating(), tensor_parallel_size=size))
    assert f"tensor_parallel_size {size}" in sentence
    assert named in sentence
    assert sentence.endswith("use 1 or 2 or 4 or 8.")


def test_the_admitted_parallel_sizes_follow_the_model():
    narrow = replace(FACTS, sharded=(ShardedDimension("attention heads", 4), ShardedDimension("output groups", 2)))
    assert only_refusal(replace(speculating(), tensor_parallel_size=4), facts=narrow).endswith("use 1 or 2.")


@pytest.mark.parametrize("dtype", ["fp8", "fp4"])
def test_packed_caches_are_refused_under_speculation_and_not_offered_without(dtype):
    assert "speculation" in only_refusal(replace(speculating(), kv_cache_dtype=dtype))
    assert f"kv_cache_dtype {dtype} is not offered" in only_refusal(Config(kv_cache_dtype=dtype))


@pytest.mark.parametrize("dtype", ["fp8", "fp4", "bf16"])
def test_index_keys_may_be_packed(dtype):
    assert admit(replace(speculating(), index_cache_dtype=dtype), FACTS).is_admitted


def test_a_drafter_that_the_checkpoint_lacks_is_refused():
    bare = replace(FACTS, draft_methods=(), draft_block_size=0)
    assert "draft stages" in only_refusal(speculating(), facts=bare)
    assert "method mtp" in only_refusal(speculating(method="mtp"))


def test_a_drafter_of_another_release_is_refused_by_name():
    other = replace(FACTS, fingerprint="b" * 64)
    config = replace(speculating(), speculative_config=SpeculativeConfig(model="elsewhere"))
    sentence = only_refusal(config, draft=other)
    assert "elsewhere" in sentence
    assert "aaaaaaaaaaaa" in sentence
    assert admit(config, FACTS, draft=FACTS).is_admitted


def test_width_above_the_trained_block_is_refused_unless_asked_for():
    assert "num_speculative_tokens 7" in only_refusal(speculating(num_speculative_tokens=7))
    allowed = speculating(num_speculative_tokens=7, dspark_config=DSparkConfig(allow_untrained_width=True))
    verdict = admit(allowed, FACTS)
    assert verdict.is_admitted
    assert any("acceptance falls" in note for note in verdict.notes)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_every_width_up_to_the_trained_block_is_admitted(width):
    assert admit(speculating(num_speculative_tokens=width), FACTS).is_admitted


def test_relaxed_acceptance_is_refused():
    assert "relaxed" in only_refusal(speculating(acceptance_method="relaxed"))


def test_forced_acceptance_has_one_spelling_and_no_schedule():
    both = speculating(spec_decode_acceptance_length=3.5, spec_decode_acceptance_rate=0.5)
    assert "twice" in only_refusal(both)
    assert "above 6" in only_refusal(speculating(spec_decode_acceptance_length=6.5))
    scheduled = DSparkConfig(schedule="threshold", draft_confidence_threshold=0.5)
    assert "threshold" in only_refusal(speculating(spec_decode_acceptance_length=3.5, dspark_config=scheduled))
    assert admit(speculating(spec_decode_acceptance_rate=1.0), FACTS).is_admitted


def test_a_rate_and_a_length_mean_the_same():
    assert SpeculativeConfig(spec_decode_acceptance_rate=0.5).forced_accepted_len(5) == 3.5
    assert SpeculativeConfig(spec_decode_acceptance_length=3.5).forced_accepted_len(5) == 3.5
    assert SpeculativeConfig().forced_accepted_len(5) is None


@pytest.mark.parametrize(
    ("dspark", "named"),
    [
        (DSparkConfig(schedule="throughput"), "calibration_profile"),
        (DSparkConfig(calibration_profile="p.json"), "schedule fixed"),
        (DSparkConfig(schedule="threshold"), "draft_confidence_threshold"),
        (DSparkConfig(draft_confidence_threshold=0.5), "schedule fixed"),
        (
            DSparkConfig(schedule="throughput", calibration_profile="p.json", draft_confidence_threshold=0.5),
            "schedule throughput",
        ),
    ],
)
def test_a_schedule_needs_its_settings_and_no_setting_is_ignored(dspark, named):
    assert named in only_refusal(speculating(dspark_config=dspark))


def test_a_schedule_with_its_settings_is_admitted():
    for dspark in (
        DSparkConfig(schedule="throughput", calibration_profile="p.json"),
        DSparkConfig(schedule="threshold", draft_confidence_threshold=0.5),
        DSparkConfig(schedule="threshold", draft_confidence_threshold=0.5, calibration_profile="p.json"),
    ):
        assert admit(speculating(dspark_config=dspark), FACTS).is_admitted


@pytest.mark.parametrize(("seqs", "width", "tokens"), [(4, 5, 23), (1, 1, 1), (100, 3, 399)])
def test_a_small_batch_is_refused_with_its_three_values(seqs, width, tokens):
    config = replace(speculating(num_speculative_tokens=width), max_num_seqs=seqs, max_num_batched_tokens=tokens)
    sentence = only_refusal(config)
    for value in (f"max_num_batched_tokens {tokens}", f"max_num_seqs {seqs}", f"num_speculative_tokens {width}"):
        assert value in sentence
    assert admit(replace(config, max_num_batched_tokens=tokens + 1), FACTS).is_admitted


def test_a_context_beyond_the_model_is_refused():
    assert "max_model_len 9000" in only_refusal(replace(speculating(), max_model_len=9000))


def test_graphs_need_a_device_that_has_them():
    full = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
    assert "CPU" in only_refusal(replace(speculating(), device="cpu", compilation_config=full))
    assert "CPU" in only_refusal(replace(speculating(), compilation_config=full), hardware=HardwareFacts())
    assert "enforce_eager" in only_refusal(
        replace(speculating(), compilation_config=full, enforce_eager=True), hardware=GPUS
    )
    assert admit(replace(speculating(), compilation_config=full), FACTS, hardware=GPUS).is_admitted


def test_sizes_of_graphs_are_for_those_who_capture_them():
    sized = replace(
        speculating(), enforce_eager=False, compilation_config=CompilationConfig(cudagraph_capture_sizes=(6,))
    )
    assert admit(sized, FACTS, hardware=GPUS).is_admitted
    assert "cudagraph_capture_sizes" in only_refusal(sized, hardware=HardwareFacts())
    assert "cudagraph_capture_sizes" in only_refusal(replace(sized, enforce_eager=True), hardware=GPUS)


@pytest.mark.parametrize("mode", ["full", "piecewise", "FULL_AND_PIECEWISE"])
def test_every_way_of_capturing_is_admitted_where_graphs_are(mode):
    config = replace(speculating(), compilation_config=CompilationConfig(cudagraph_mode=mode))
    assert admit(config, FACTS, hardware=GPUS).is_admitted
    assert "needs a device that captures" in only_refusal(config, hardware=HardwareFacts())


@pytest.mark.parametrize(
    ("compilation", "named"),
    [
        (CompilationConfig(level=3), "level 3"),
        (CompilationConfig(cudagraph_mode="none", cudagraph_capture_sizes=(1, 2)), "cudagraph_capture_sizes"),
    ],
)
def test_compilation_settings_that_nothing_reads_are_refused(compilation, named):
    assert named in only_refusal(replace(speculating(), compilation_config=compilation), hardware=GPUS)


def test_missing_devices_are_refused():
    assert "device cuda" in only_refusal(replace(speculating(), device="cuda"), hardware=HardwareFacts())
    assert "4" in only_refusal(replace(speculating(), tensor_parallel_size=8), hardware=GPUS)


def test_all_refusals_are_listed_at_once():
    config = replace(speculating(num_speculative_tokens=9), kv_cache_dtype="fp8", max_model_len=10**6)
    with pytest.raises(ConfigError) as caught:
        config.validated(FACTS)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank_timeout_s": 3.0}, "rank_timeout_s 3"),
        ({"rank_setup_timeout_s": 60}, "rank_setup_timeout_s 60"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"prefix_cache_interval": 64, "enable_prefix_caching": False}, "prefix_cache_interval 64"),
    ],
)
def test_a_setting_without_effect_is_told(settings, named):
    assert any(f"{named} has no effect" in note for note in admit(Config(**settings), FACTS).notes)
    effective = {"tensor_parallel_size": 2} | settings | {"enable_prefix_caching": True}
    assert not any("no effect" in note for note in admit(Config(**effective), FACTS).notes)


def test_plain_decoding_says_why():
    assert any("speculation is not running because" in note for note in admit(Config(), FACTS).notes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Config(model=""),
        lambda: Config(model=3),
        lambda: Config(max_num_seqs=0),
        lambda: Config(max_num_seqs=True),
        lambda: Config(tensor_parallel_size=-1),
        lambda: Config(kv_cache_dtype="int8"),
        lambda: Config(index_cache_dtype="fp16"),
        lambda: Config(device="tpu"),
        lambda: Config(gpu_memory_utilization=0.0),
        lambda: Config(rank_timeout_s=1e-9),
        lambda: Config(rank_timeout_s=1e300),
        lambda: Config(rank_setup_timeout_s=0.0),
        lambda: Config(speculative_config="dspark"),
        lambda: SpeculativeConfig(method="eagle"),
        lambda: SpeculativeConfig(num_speculative_tokens=0),
        lambda: SpeculativeConfig(spec_decode_acceptance_length=0.5),
        lambda: SpeculativeConfig(spec_decode_acceptance_rate=1.5),
        lambda: DSparkConfig(schedule="dynamic"),
        lambda: DSparkConfig(draft_confidence_threshold=0.0),
        lambda: CompilationConfig(level=9),
        lambda: CompilationConfig(cudagraph_mode="half"),
        lambda: CompilationConfig(cudagraph_capture_sizes=(4, 2)),
        lambda: CompilationConfig(cudagraph_capture_sizes=4),
        lambda: CompilationConfig(cudagraph_capture_sizes=None),
        lambda: CompilationConfig(cudagraph_capture_sizes="124"),
    ],
)
def test_a_field_is_checked_when_it_is_made(make):
    with pytest.raises(ConfigError):
        make()
