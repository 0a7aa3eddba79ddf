"""The whole way of the embedded model, in small: text, tokenizer, shards, target, drafters, checkpoint, engine.

A few steps teach nothing; what is tested is that each stage reads what the one before it wrote, that a finished run is
found again, and that the engine reads the result with the values that training saw.
"""

import json
import lzma
import random

import pytest
import torch
from typer.testing import CliRunner

from dspark import LLM, Config, SamplingParams, SpeculativeConfig
from dspark.cli.train import train_app
from dspark.config.errors import DSparkError
from dspark.models.build import load_model
from dspark.train import embedded, target
from dspark.train.corpus import DOMAINS
from dspark.train.runs import SUMMARY_NAME, RunPlan, load_drafter, load_target
from dspark.train.twins import stored_values
from dspark.validate.doctor import examine

VOCAB_ROWS, VOCAB_TOKENS = 320, 300
LLM_CONFIG = Config(speculative_config=SpeculativeConfig())
SMALL = {
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 1,
    "n_routed_experts": 4,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "engram_vocab_size": 40,
    "engram_n_heads": 2,
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 2,
    "dspark_num_experts_per_tok": 1,
}
STEPS = [
    "--batch-size",
    "2",
    "--seq-len",
    "32",
    "--device",
    "cpu",
    "--no-compile",
    "--evals",
    "1",
    "--warmup-steps",
    "1",
]


def train(*arguments):
    """Run `dspark train`; a failure is raised."""
    result = CliRunner().invoke(train_app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def write_corpus(folder):
    """Text with enough different words for every domain."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(80)]
    for split, count in (("train", 12), ("heldout", 4)):
        for domain in DOMAINS:
            with lzma.open(folder / f"{split}-{domain}.jsonl.xz", "wt") as out:
                for _ in range(count):
                    text = " ".join(rng.choices(words, k=60))
                    if domain in ("chat", "math"):
                        text = f"User: {text}\nAssistant: {text[:90]}"
                    out.write(json.dumps({"source": "s", "text": text}) + "\n")


@pytest.fixture(scope="module")
def small():
    """The configuration of the embedded model with every size made small."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in SMALL.items():
            patch.setitem(embedded._TEXT, key, value)
        patch.setattr(target, "VOCAB_SIZE", VOCAB_ROWS)
        yield


@pytest.fixture(scope="module")
def work(small, tmp_path_factory):
    """Every stage once, by its command."""
    folder = tmp_path_factory.mktemp("train")
    write_corpus(folder)
    files = ["--tokens", folder / "shards", "--tokenizer", folder / "tokenizer"]
    train("tokenizer", "--corpus", folder, "--out", folder / "tokenizer", "--vocab-size", VOCAB_TOKENS)
    train("tokens", "--corpus", folder, "--out", folder / "shards", "--tokenizer", folder / "tokenizer")
    train("target", *files, "--out", folder / "target", "--steps", 3, *STEPS)
    train(
        *("drafter", *files, "--target", folder / "target", "--out", folder / "drafters"),
        *("--steps", 2, "--anchors", 4, *STEPS),
    )
    train(
        *("export", "--target", folder / "target", "--drafter", folder / "drafters", "--out", folder / "model"),
        *("--tokenizer", folder / "tokenizer"),
    )
    return folder


def test_a_run_leaves_its_record(work):
    record = json.loads((work / "target" / SUMMARY_NAME).read_text())
    assert (record["reason"], record["step"], record["device"]) == ("finished", 3, "cpu")
    assert set(record["heldout_bits_per_byte"]) == set(DOMAINS)
    assert all(bits > 0 for bits in record["heldout_bits_per_byte"].values())
    drafters = json.loads((work / "drafters" / SUMMARY_NAME).read_text())
    assert drafters["step"] == 2
    assert "heldout_bits_per_byte" not in drafters


def test_a_finished_run_is_found_and_other_settings_are_refused(work):
    files = ["--tokens", work / "shards", "--tokenizer", work / "tokenizer", "--out", work / "target"]
    before = (work / "target" / "log.jsonl").read_text()
    summary = json.loads(train("target", *files, "--steps", 3, *STEPS, "--json"))
    assert (summary["reason"], summary["step"]) == ("finished", 3)
    assert (work / "target" / "log.jsonl").read_text().startswith(before)
    with pytest.raises(DSparkError, match="other settings"):
        train("target", *files, "--steps", 3, *STEPS, "--seq-len", 34)


def test_the_checkpoint_holds_the_values_that_training_used(work):
    trained = load_target(work / "target", work / "tokenizer", "cpu", compiled=False)
    loaded = load_model(work / "model")
    assert loaded.plan.layers == trained.plan.layers
    for name, values in trained.model.named_parameters():
        found = loaded.target.get_parameter(name)
        if values.dim() == 1:
            assert torch.allclose(found, values, rtol=2**-8, atol=0.0), name
        else:
            assert torch.equal(found, _stored(name, values.detach())), name
    assert torch.equal(loaded.target.token_map, trained.model.token_map)


def _stored(name, values):
    """A matrix as the exported layout holds it."""
    leaf = name.split(".")[-2]
    if name.endswith(".fn"):
        return values
    if ".experts.w" in name:
        return stored_values(values, "fp4_group")
    if name.endswith("engram.embed.weight"):
        return stored_values(values, "fp8_row")
    is_coded = leaf in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w13", "w2") and "compressor" not in name
    return stored_values(values, "fp8_block" if is_coded else "bf16")


def test_the_engine_runs_the_export_with_and_without_its_draft(work):
    assert examine(work / "model", LLM_CONFIG).is_healthy
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    texts = []
    for draft in ("dspark", "off"):
        llm = LLM(work / "model", draft=draft, max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64)
        (completion,) = llm.generate("abc def ghij", params)
        texts.append(completion.token_ids)
        assert max(completion.token_ids) < VOCAB_TOKENS
    assert texts[0] == texts[1]


def test_a_target_alone_can_be_exported(work, tmp_path):
    train("export", "--target", work / "model", "--out", tmp_path / "m", "--tokenizer", work / "tokenizer")
    assert "carries no draft stages" in LLM(tmp_path / "m", max_num_seqs=1, max_model_len=64).speculation_status
    first, second = load_model(work / "model").target, load_model(tmp_path / "m").target
    for name, values in first.named_parameters():
        assert torch.equal(values, second.get_parameter(name)), name


@pytest.mark.parametrize("variant", ["dspark", "parallel", "mtp"])
def test_every_variant_of_a_drafters_run_can_be_read(work, variant):
    trained = load_target(work / "target", work / "tokenizer", "cpu", compiled=False)
    drafter = load_drafter(work / "drafters", variant, trained)
    assert drafter.block_size == (1 if variant == "mtp" else 5)
    has_markov = bool(drafter.model.markov_head.weight.abs().sum() > 0)
    assert has_markov == (variant == "dspark")


def test_what_is_no_run_is_refused(work, tmp_path):
    with pytest.raises(DSparkError, match="neither a target's run"):
        load_target(tmp_path, work / "tokenizer", "cpu", compiled=False)
    trained = load_target(work / "target", work / "tokenizer", "cpu", compiled=False)
    with pytest.raises(DSparkError, match="has no mtp drafter"):
        load_drafter(work / "target", "mtp", trained)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", 1, *STEPS, "--seq-len", 33], "--seq-len 33"),
        (["--steps", 1, *STEPS, "--batch-size", 0], "--batch-size 0"),
        (["--steps", 1, *STEPS, "--device", "tpu"], "--device 'tpu'"),
        ([*STEPS], "steps"),
        (["--minutes", "nan", *STEPS], "must be positive"),
    ],
)
def test_nonsense_is_a_sentence(work, tmp_path, arguments, named):
    files = ["--tokens", work / "shards", "--tokenizer", work / "tokenizer", "--out", tmp_path / "run"]
    with pytest.raises(DSparkError, match=named):
        train("target", *files, *arguments)


def test_a_plan_is_checked_when_it_is_made(tmp_path):
    with pytest.raises(DSparkError, match="at least 16"):
        RunPlan(tmp_path, tmp_path, tmp_path, seq_len=8)


@pytest.mark.parametrize("size", ["nan", "inf", "0"])
@pytest.mark.parametrize(("command", "option"), [("tokenizer", "--sample-mb"), ("tokens", "--max-mtokens")])
def test_no_size_of_a_corpus_is_not_finite(tmp_path, command, option, size):
    with pytest.raises(DSparkError, match=f"{option} is"):
        train(command, "--corpus", tmp_path, "--out", tmp_path / "out", option, size)
