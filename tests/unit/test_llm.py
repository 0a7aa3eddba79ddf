"""Everything in a configuration is honoured, refused with a sentence, or noted; nothing is ignored in silence."""

from dataclasses import replace

import pytest
import torch

from dspark import CompilationConfig, Config, CUDAGraphMode, DSparkConfig, SamplingParams, SpeculativeConfig
from dspark.config import CheckpointError, ConfigError
from dspark.engine import LLM
from dspark.engine.device import engine_facts
from dspark.engine.identity import engine_identity
from dspark.models.build import read_plan
from dspark.ops.opset import TORCH_OPS
from dspark.validate.doctor import examine
from support.profiles import profile_fields, write_profile
from support.tiny_checkpoints import copy_checkpoint, word_tokenizer, write_tiny_checkpoint
from support.tiny_models import BLOCK, NUM_VALID, VOCAB

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
PROMPTS = [PROMPT, [27, 18, 28], [1 + n % 60 for n in range(30)]]
SMALL: dict = {"max_num_seqs": 3, "max_model_len": 96, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(folder):
    return LLM(folder, draft="off", **SMALL)


@pytest.fixture(scope="module")
def drafted(folder):
    return LLM(folder, **SMALL)


def drafting(model=None, **dspark):
    return SpeculativeConfig(model=model, dspark_config=DSparkConfig(**dspark))


def tokens(llm, params):
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


def test_it_runs_on_the_cpu_and_says_so(drafted, plain):
    assert drafted.device == "cpu"
    assert drafted.admission.is_admitted
    assert drafted.speculation_status == "running"
    assert plain.speculation_status == "not running because it is switched off"
    assert any("switched off" in note for note in plain.admission.notes)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_drafts_change_no_token(drafted, plain, params):
    assert tokens(drafted, params) == tokens(plain, params)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "cuda"}, "device cuda is asked for"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"kv_cache_dtype": "fp4", "speculative_config": None}, "kv_cache_dtype fp4 is not offered"),
        ({"compilation_config": CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)}, "cudagraph_mode full"),
        ({"compilation_config": CompilationConfig(level=1)}, "compilation level 1"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens 8"),
        ({"max_model_len": 513}, "max_model_len 513"),
        ({"speculative_config": SpeculativeConfig(method="mtp")}, "method mtp"),
        ({"speculative_config": drafting(schedule="throughput")}, "calibration_profile"),
    ],
)
def test_what_it_does_not_do_is_refused_before_weights_are_read(folder, monkeypatch, settings, named):
    monkeypatch.setattr(
        "dspark.engine.ranks.opening.load_model", lambda *args, **options: pytest.fail("weights were read")
    )
    with pytest.raises(ConfigError, match=named):
        LLM(folder, **(SMALL | settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization 0.5 is ignored"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel has no effect"),
        ({"exactness": "fast"}, "may depend on who shares its batch"),
        ({"speculative_config": SpeculativeConfig(spec_decode_acceptance_rate=1.0)}, "meaningless"),
    ],
)
def test_what_has_no_effect_or_a_price_is_noted(folder, settings, named):
    assert any(named in note for note in LLM(folder, **(SMALL | settings)).admission.notes)


def test_what_is_done_in_another_way_is_remarked(folder):
    remarks = LLM(folder, **SMALL, index_cache_dtype="fp4").admission.remarks
    assert any("index_cache_dtype fp4" in remark for remark in remarks)
    honoured = LLM(folder, **SMALL, index_cache_dtype="bf16")
    assert honoured.admission.remarks == ()


def test_an_accelerator_that_stays_idle_is_noted(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("dspark.engine.device._has_triton", lambda: False)
    assert any("2 accelerators idle" in note for note in LLM(folder, **SMALL).admission.notes)
    assert LLM(folder, **SMALL, device="cpu").admission.notes == ()


def stores(llm):
    state = llm.loop.engine.state
    return [*state.rings.values(), *state.appends.values()]


def test_rows_are_stored_as_asked_and_index_keys_as_bf16(folder):
    wide = LLM(folder, **SMALL, kv_cache_dtype="fp32").loop.engine.state
    narrow = LLM(folder, **SMALL).loop.engine.state
    for key in narrow.appends:
        is_index = key.endswith(".index")
        assert narrow.appends[key].dtype == torch.bfloat16
        assert wide.appends[key].dtype == (torch.bfloat16 if is_index else torch.float32)
    assert narrow.rings["layers.0"].dtype == torch.bfloat16
    assert wide.rings["layers.0"].dtype == torch.float32


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp32"}, {"speculative_config": None}])
def test_the_doctor_tells_the_memory_that_is_taken(folder, settings):
    config = Config(model=str(folder), speculative_config=SpeculativeConfig(), **SMALL)
    config = replace(config, **settings)
    report = examine(folder, config, engine=engine_facts())
    llm = LLM(config=config)
    assert report.requests_bytes == sum(store.nbytes for store in stores(llm))
    tables = [buffer for name, buffer in llm.loop.engine.model.named_buffers() if name.endswith("tid2eid")]
    held = [*llm.loop.engine.model.parameters(), *tables]
    assert report.float32_bytes == sum(tensor.nbytes for tensor in held)


def test_a_checkpoint_without_drafter_decodes_plainly_unless_a_drafter_was_asked_for(tmp_path, plain):
    folder = write_tiny_checkpoint(tmp_path / "m", with_draft=False)
    llm = LLM(folder, **SMALL)
    assert "carries no draft stages" in llm.speculation_status
    assert any("carries no draft stages" in note for note in llm.admission.notes)
    assert tokens(llm, GREEDY) == tokens(plain, GREEDY)
    with pytest.raises(ConfigError, match="draft stages"):
        LLM(folder, **SMALL, speculative_config=SpeculativeConfig())


def test_a_drafter_in_another_folder_of_the_same_release_is_used(folder, tmp_path, plain):
    other = copy_checkpoint(folder, tmp_path / "drafter")
    llm = LLM(folder, **SMALL, speculative_config=drafting(str(other)))
    assert llm.speculation_status == "running"
    assert tokens(llm, GREEDY) == tokens(plain, GREEDY)


def test_the_drafter_comes_from_the_folder_that_is_named(folder, tmp_path):
    other = copy_checkpoint(folder, tmp_path / "drafter")
    changed = write_tiny_checkpoint(tmp_path / "changed", seed=1)
    for name in ("model.safetensors.index.json", "config.json"):
        assert (changed / name).read_bytes() == (other / name).read_bytes()
    own = LLM(folder, **SMALL).loop.engine.model
    named = LLM(folder, **SMALL, speculative_config=drafting(str(changed))).loop.engine.model
    assert torch.equal(own.target.head.weight, named.target.head.weight)
    assert not torch.equal(own.draft.markov_head.weight, named.draft.markov_head.weight)
    assert torch.equal(named.draft.markov_head.weight, LLM(changed, **SMALL).loop.engine.model.draft.markov_head.weight)


def test_a_drafter_of_another_release_is_refused_by_name(folder, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", rope_theta=20000)
    with pytest.raises(ConfigError, match="does not belong to the target") as caught:
        LLM(folder, **SMALL, speculative_config=drafting(str(other)))
    assert str(other) in str(caught.value)


def test_a_drafter_that_is_nowhere_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(folder, **SMALL, speculative_config=drafting(str(tmp_path / "nowhere")))


def test_the_target_s_own_folder_by_another_path_is_no_other_drafter(folder):
    detour = folder / ".." / folder.name
    assert LLM(folder, **SMALL, speculative_config=drafting(str(detour))).speculation_status == "running"


class Rounds:
    def __init__(self):
        self.records = []

    def observe(self, record):
        self.records.append(record)


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Every row that has no token is the likeliest of all, in the target and in the draft."""
    llm = LLM(write_tiny_checkpoint(tmp_path_factory.mktemp("padded") / "m"), **SMALL)
    logits = llm.loop.engine.model.target.logits

    def tempting(hidden):
        rows = logits(hidden)
        rows[:, NUM_VALID:] = 1e4
        return rows

    llm.loop.engine.model.target.logits = tempting
    return llm


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, sampler="ratio"), replace(SAMPLED, top_p=1.0)])
def test_rows_without_a_token_are_never_proposed_drawn_or_counted(padded, params):
    assert NUM_VALID < VOCAB
    rounds = Rounds()
    padded.observe_rounds(rounds)
    completions = padded.generate(PROMPTS, replace(params, logprobs=64, presence_penalty=0.3))
    padded.observe_rounds(None)
    drafts = [token for record in rounds.records for token in record.draft_ids]
    assert len(drafts) > BLOCK
    assert max(drafts) < NUM_VALID
    for completion in completions:
        assert max(completion.token_ids) < NUM_VALID
        for found in completion.logprobs:
            assert max(token for token, _ in found.top) < NUM_VALID
            assert -1e3 < found.token <= 0.0


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([3, NUM_VALID], GREEDY, "the prompt"),
        ([3], replace(GREEDY, stop_token_ids=(NUM_VALID,)), "stop_token_ids"),
        ([3], replace(GREEDY, logit_bias={VOCAB - 1: 5.0}), "logit_bias"),
    ],
)
def test_ids_without_a_token_are_refused(drafted, prompt, params, named):
    with pytest.raises(ConfigError, match=f"{named} holds the token id"):
        drafted.generate([prompt], params)
    assert not drafted.loop.engine.requests


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    other = copy_checkpoint(folder, tmp_path / "m")
    (other / "tokenizer.json").write_text(word_tokenizer(VOCAB + 1).to_str())
    with pytest.raises(CheckpointError, match=f"{VOCAB + 1} tokens"):
        LLM(other, **SMALL)


def profile_for(config, folder, path, steps_per_second):
    identity = engine_identity(config, read_plan(folder), folder, TORCH_OPS)
    fields = profile_fields(BLOCK, config.max_num_seqs, identity)
    return write_profile(path, fields | {"sps_table": [steps_per_second(rows) for rows in range(19)]})


@pytest.mark.parametrize("schedule", ["throughput", "threshold"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_calibrated_schedule_changes_lengths_and_no_token(folder, plain, tmp_path, schedule, params):
    base = Config(model=str(folder), **SMALL)
    path = profile_for(base, folder, tmp_path / "profile.json", lambda rows: 100.0 / (4 + rows))
    threshold = 0.4 if schedule == "threshold" else None
    dspark = drafting(schedule=schedule, calibration_profile=path, draft_confidence_threshold=threshold)
    llm = LLM(config=replace(base, speculative_config=dspark))
    completions = llm.generate(PROMPTS, params)
    assert [completion.token_ids for completion in completions] == tokens(plain, params)
    lengths = [sum(column) for column in zip(*(c.statistics.verify_lens for c in completions), strict=True)]
    assert sum(count > 0 for count in lengths) > 1


def test_when_every_row_costs_as_much_as_a_step_nothing_is_verified(folder, plain, tmp_path):
    base = Config(model=str(folder), **SMALL)
    path = profile_for(base, folder, tmp_path / "profile.json", lambda rows: 1000.0 * 0.25**rows)
    dspark = drafting(schedule="throughput", calibration_profile=path)
    llm = LLM(config=replace(base, speculative_config=dspark))
    completions = llm.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in completions] == tokens(plain, GREEDY)
    assert sum(completion.statistics.num_verified for completion in completions) == 0


def test_a_profile_of_another_engine_is_refused(folder, tmp_path):
    base = Config(model=str(folder), **SMALL)
    path = profile_for(base, folder, tmp_path / "profile.json", lambda rows: 1.0)
    dspark = drafting(schedule="throughput", calibration_profile=path)
    with pytest.raises(ConfigError, match=r"identity\.kv_cache_dtype is 'bf16', and here it is 'fp32'"):
        LLM(config=replace(base, speculative_config=dspark, kv_cache_dtype="fp32"))
