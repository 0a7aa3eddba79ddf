"""A config.json with any wrong value becomes a plan that can be accounted for, or one sentence; never a crash."""

import copy

import pytest

from dspark.config import ConfigError
from dspark.models.facts import model_facts
from dspark.models.inventory import expected_tensors
from dspark.models.registry import parse_config
from support.tiny_models import FAMILIES, tiny_config

WRONG = ["x", -1, 0, None, [], {}, 1.5, True, [1]]


def sections(config):
    yield config
    if "text_config" in config:
        yield config["text_config"]


def account(config):
    """Number of tensors of a configuration, or the sentence that refuses it."""
    try:
        plan = parse_config(config)
    except ConfigError as error:
        return str(error)
    assert model_facts(plan).vocab_size > 0
    return len(expected_tensors(plan))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_wrong_value_is_a_sentence_or_harmless(family):
    for place, section in enumerate(sections(tiny_config(family))):
        for key in section:
            for value in WRONG:
                config = copy.deepcopy(tiny_config(family))
                list(sections(config))[place][key] = value
                found = account(config)
                assert "\n" not in found if isinstance(found, str) else found > 0


@pytest.mark.parametrize(
    ("family", "key", "value", "named"),
    [
        ("v4", "hidden_size", "wide", "hidden_size is 'wide', not an integer"),
        ("v4", "num_attention_heads", 0, "num_heads is 0, below 1"),
        ("v4", "vocab_size", True, "vocab_size is True, not an integer"),
        ("v4", "swiglu_limit", float("nan"), "limit is nan, not a finite number"),
        ("v4", "compress_ratios", [0], "compress_ratios has 1 entries for num_hidden_layers 4"),
        ("v41", "engram_compressed_vocab_size", 0, "engram|wrong kind"),
        ("v41", "engram_n_heads", 10**12, "primes from engram_vocab_size"),
        ("v41", "engram_max_ngram_size", 10**12, "primes from engram_vocab_size"),
        ("v41", "rms_norm_eps", -1, "norm_eps is -1, not above 0"),
        ("v4", "rope_theta", 0, "base is 0, not above 0"),
        ("v41", "dspark_noise_token_id", 10**6, "dspark_noise_token_id is 1000000, and vocab_size"),
        ("v4", "eos_token_id", [1, 10**6], "eos_token_id is 1000000, and vocab_size"),
        ("v4", "scoring_func", "softmax", "scoring_func is 'softmax'; only 'sqrtsoftplus' is computed"),
        ("v41", "norm_topk_prob", False, "norm_topk_prob is False; only True is computed"),
        ("v41", "n_shared_experts", 2, "n_shared_experts is 2; only 1 is computed"),
        ("v4", "tie_word_embeddings", True, "tie_word_embeddings is True; only False is computed"),
        ("v4", "vocab_size", 10**30, "more than a tensor can have"),
        ("v4", "dspark_target_layer_ids", [], r"dspark_target_layer_ids is \[\], not different ones of the 4 layers"),
        ("v4", "dspark_target_layer_ids", [0, 4], r"is \[0, 4\], not different ones of the 4 layers"),
        ("v41", "dspark_target_layer_ids", [2, 2], r"is \[2, 2\], not different ones of the 6 layers"),
        ("v41", "compress_ratios", [0, 2, 2, 1, 1, 1, 1, 0], "draft stage mtp.0 has compress_ratio 1, not 0"),
        ("v4", "num_experts_per_tok", 99, "layers.0 chooses 99 of"),
        ("v41", "dspark_num_experts_per_tok", 99, "mtp.0 chooses 99 of"),
        ("v41", "qk_rope_head_dim", 34, "qk_rope_head_dim 34, not even or above 32"),
        ("v4", "qk_rope_head_dim", 7, "qk_rope_head_dim 7, not even or above"),
        ("v4", "compress_rope_theta", 1, "compress_rope_theta 1"),
        ("v41", "head_dim", 16, "head_dim 16, not a multiple of 32"),
        ("v4", "head_dim", 40, "head_dim 40 less qk_rope_head_dim"),
        ("v4", "index_head_dim", 4, "index_head_dim 4, below qk_rope_head_dim"),
        ("v4", "index_head_dim", 96, "index_head_dim 96, not a power of two"),
        ("v4", "index_head_dim", 16, "index_head_dim 16, (not a multiple of 32|below)"),
        ("v41", "o_groups", 2, "3 heads in 2 equal output groups"),
        ("v41", "kv_source_layer_ids", [0, 3], "takes the compressed rows of layer 0, which has none of ratio 2"),
        ("v41", "kv_source_layer_ids", [1], "takes the compressed rows of layer 1, which has none of ratio 1"),
        ("v41", "index_source_layer_ids", [0, 3, 4], "takes the picks of layer 0, which has none of ratio 2"),
        ("v41", "candidate_source_layer_id", 2, "takes the candidates of layer 2, which has none"),
    ],
)
def test_the_wrong_value_is_named(family, key, value, named):
    config = tiny_config(family)
    (config if family == "v4" else config["text_config"])[key] = value
    with pytest.raises(ConfigError, match=named):
        parse_config(config)


@pytest.mark.parametrize(
    "key", ["hidden_size", "q_lora_rank", "o_lora_rank", "moe_intermediate_size", "engram_head_dim"]
)
def test_what_is_quantised_in_groups_has_whole_ones(key):
    config = tiny_config("v41", quantised=True)
    config["text_config"][key] = size = 12 if "engram" in key else 48
    with pytest.raises(
        ConfigError, match=f"{key} {4 * size if 'engram' in key else size}, not a multiple of the quantised blocks' 32"
    ):
        parse_config(config)
