"""Fields of config.json that both model families spell alike."""

from collections.abc import Mapping
from typing import Any

from dspark.config.errors import ConfigError
from dspark.layers.plans import AttentionPlan, CacheQuantPlan, CompressionPlan, QuantPlan, RopePlan, Storage
from dspark.ops.rope import YarnPlan

# Arithmetic that every layer is built with. A config.json that spells out another is of a model not known here.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def check_fixed_fields(settings: Mapping[str, Any]) -> None:
    """Refuse what would otherwise be computed as if it said something else.

    Raises:
        ConfigError: names the key, its value, and what is known.
    """
    for key, known in _FIXED.items():
        if key in settings and settings[key] != known:
            raise ConfigError(
                f"{key} is {settings[key]!r}; only {known!r} is computed: give a checkpoint of a known family"
            )


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids; config.json holds one id or a list."""
    eos = config["eos_token_id"]
    return tuple(eos) if isinstance(eos, list) else (eos,)


def yarn_plan(scaling: Mapping[str, Any]) -> YarnPlan:
    """The YaRN plan of a rope_scaling entry."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ConfigError(f"rope_scaling type is {kind!r}; only 'yarn' is known: check config.json")
    return YarnPlan(
        scaling["factor"], scaling["beta_fast"], scaling["beta_slow"], scaling["original_max_position_embeddings"]
    )


def quant_plan(settings: Mapping[str, Any] | None, expert_dtype: str | None, engram: Storage) -> QuantPlan:
    """Storage of the quantised weights; everything is bf16 where config.json has no quantization_config."""
    if settings is None:
        return QuantPlan(Storage.BF16, Storage.BF16, Storage.BF16, 0)
    method, scales = settings.get("quant_method"), settings.get("scale_fmt")
    rows, columns = settings["weight_block_size"]
    if method != "fp8" or scales != "ue8m0" or rows != columns:
        raise ConfigError(
            f"quantization_config has quant_method {method!r}, scale_fmt {scales!r} and weight_block_size "
            f"[{rows}, {columns}]; known are 'fp8', 'ue8m0' and square blocks: convert the checkpoint first"
        )
    if expert_dtype not in ("fp4", "fp8", None):
        raise ConfigError(f"expert_dtype is {expert_dtype!r}; known are 'fp4' and 'fp8'")
    experts = Storage.FP4_GROUP if expert_dtype == "fp4" else Storage.FP8_BLOCK
    return QuantPlan(Storage.FP8_BLOCK, experts, engram, rows)


def attention_plan(
    settings: Mapping[str, Any],
    compression: CompressionPlan | None,
    *,
    window_quant: CacheQuantPlan,
    normalise_query_heads: bool,
) -> AttentionPlan:
    """The attention of one layer; layers that compress turn by another base, with YaRN.

    Args:
        settings: the keys of the text model.
        compression: what the layer sees beyond its window.
        window_quant, normalise_query_heads: what the families do differently.
    """
    rope = RopePlan(settings["qk_rope_head_dim"], settings["rope_theta"], None)
    if compression is not None:
        yarn = yarn_plan(settings["rope_scaling"])
        rope = RopePlan(settings["qk_rope_head_dim"], settings["compress_rope_theta"], yarn)
    return AttentionPlan(
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        head_dim=settings["head_dim"],
        q_rank=settings["q_lora_rank"],
        o_rank=settings["o_lora_rank"],
        o_groups=settings["o_groups"],
        window=settings["sliding_window"],
        norm_eps=settings["rms_norm_eps"],
        normalise_query_heads=normalise_query_heads,
        rope=rope,
        window_quant=window_quant,
        compression=compression,
    )
