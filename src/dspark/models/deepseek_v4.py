"""Configuration of DeepSeek-V4-Flash: the released config.json as a `ModelPlan`."""

from collections.abc import Mapping
from typing import Any

from dspark.config.errors import ConfigError
from dspark.layers.plans import (
    AttentionPlan,
    CacheQuantPlan,
    CompressionPlan,
    CompressorPlan,
    DraftPlan,
    HyperPlan,
    IndexerPlan,
    LayerPlan,
    ModelPlan,
    MoePlan,
    QuantPlan,
    Storage,
)
from dspark.models.config_fields import attention_plan, check_fixed_fields, eos_ids, quant_plan

MODEL_TYPE = "deepseek_v4"

_CACHE_QUANT = CacheQuantPlan("fp8", 64, skip_rope=True)
_INDEX_QUANT = CacheQuantPlan("fp4", 32)
_INDEXED_RATIO = 4


def parse_config(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of a V4-Flash checkpoint; the draft stages are the ratios beyond the hidden layers."""
    check_fixed_fields(config)
    num_layers = config["num_hidden_layers"]
    num_stages = len(config["compress_ratios"]) - num_layers
    if num_stages < 0:
        raise ConfigError(
            f"compress_ratios has {len(config['compress_ratios'])} entries for num_hidden_layers {num_layers}: fetch "
            "config.json again"
        )
    if "dspark_block_size" not in config:
        num_stages = 0
    hyper = HyperPlan(
        config["hc_mult"], config["hc_sinkhorn_iters"], config["hc_eps"], config["rms_norm_eps"], shifted=False
    )
    blocks = tuple(_layer_plan(config, index, num_layers, hyper) for index in range(num_layers + num_stages))
    return ModelPlan(
        family=MODEL_TYPE,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        bos_token_id=config["bos_token_id"],
        eos_token_ids=eos_ids(config),
        quant=_quant_plan(config),
        layers=blocks[:num_layers],
        hyper=hyper,
        head_mix=True,
        draft=_draft_plan(config, blocks[num_layers:]) if num_stages else None,
        ngrams=None,
    )


def _quant_plan(config: Mapping[str, Any]) -> QuantPlan:
    return quant_plan(config.get("quantization_config"), config.get("expert_dtype"), Storage.BF16)


def _layer_plan(config: Mapping[str, Any], index: int, num_layers: int, hyper: HyperPlan) -> LayerPlan:
    is_stage = index >= num_layers
    hashed = not is_stage and index < config["num_hash_layers"]
    return LayerPlan(
        name=f"mtp.{index - num_layers}" if is_stage else f"layers.{index}",
        index=index,
        hidden_size=config["hidden_size"],
        norm_eps=config["rms_norm_eps"],
        attention=_attention_plan(config, index),
        moe=MoePlan(
            hidden_size=config["hidden_size"],
            inner_size=config["moe_intermediate_size"],
            shared_size=config["moe_intermediate_size"],
            num_experts=config["n_routed_experts"],
            topk=config["num_experts_per_tok"],
            limit=config["swiglu_limit"],
            scaling=config["routed_scaling_factor"],
            normalise=True,
            sum_eps=0.0,
            hash_vocab_size=config["vocab_size"] if hashed else 0,
        ),
        hyper=hyper,
        engram=None,
    )


def _attention_plan(config: Mapping[str, Any], index: int) -> AttentionPlan:
    ratio = config["compress_ratios"][index]
    compression = _compression_plan(config, index, ratio) if ratio else None
    return attention_plan(config, compression, window_quant=_CACHE_QUANT, normalise_query_heads=True)


def _compression_plan(config: Mapping[str, Any], index: int, ratio: int) -> CompressionPlan:
    indexed = ratio == _INDEXED_RATIO
    return CompressionPlan(
        ratio=ratio,
        source_layer=index,
        compressor=CompressorPlan(config["head_dim"], ratio, overlap=indexed, position_bias=True),
        cache_quant=_CACHE_QUANT,
        indexer=_indexer_plan(config, index) if indexed else None,
        pick_layer=index if indexed else None,
    )


def _indexer_plan(config: Mapping[str, Any], index: int) -> IndexerPlan:
    return IndexerPlan(
        num_heads=config["index_n_heads"],
        head_dim=config["index_head_dim"],
        topk=config["index_topk"],
        key_layer=index,
        owns_keys=True,
        key_compressor=CompressorPlan(config["index_head_dim"], _INDEXED_RATIO, overlap=True, position_bias=True),
        hadamard=True,
        cache_quant=_INDEX_QUANT,
        candidates=None,
    )


def _draft_plan(config: Mapping[str, Any], stages: tuple[LayerPlan, ...]) -> DraftPlan:
    return DraftPlan(
        stages=stages,
        block_size=config["dspark_block_size"],
        noise_token_id=config["dspark_noise_token_id"],
        markov_rank=config["dspark_markov_rank"],
        target_layer_ids=tuple(sorted(config["dspark_target_layer_ids"])),
        captures_output=True,
        markov_embed="markov_w1",
        markov_head="markov_w2",
    )
