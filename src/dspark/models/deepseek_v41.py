"""Configuration of DeepSeek-V4.1: the released config.json as a `ModelPlan`."""

from collections.abc import Mapping
from typing import Any

from dspark.layers.plans import (
    AttentionPlan,
    CacheQuantPlan,
    CandidatePlan,
    CompressionPlan,
    CompressorPlan,
    DraftPlan,
    HyperPlan,
    IndexerPlan,
    LayerPlan,
    ModelPlan,
    MoePlan,
    NgramPlan,
    QuantPlan,
    Storage,
)
from dspark.models.config_fields import attention_plan, check_fixed_fields, eos_ids, quant_plan
from dspark.models.engram_tables import engram_plans

MODEL_TYPE = "deepseek_v41"
ARCHITECTURE = "DeepseekV41ForCausalLM"

_WINDOW_QUANT = CacheQuantPlan("fp8", 32)
_COMPRESSED_QUANT = CacheQuantPlan("fp4_e4m3", 16)
_INDEX_QUANT = CacheQuantPlan("fp4", 32)


def parse_config(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of a V4.1 checkpoint; every missing or contradictory key is a ConfigError that names it."""
    text = config["text_config"]
    check_fixed_fields(text)
    num_layers = text["num_hidden_layers"]
    num_stages = text["num_nextn_predict_layers"]
    hyper = HyperPlan(text["hc_mult"], text["hc_sinkhorn_iters"], text["hc_eps"], text["rms_norm_eps"], shifted=True)
    engrams = engram_plans(text)
    layers = tuple(
        LayerPlan(
            name=f"layers.{index}",
            index=index,
            hidden_size=text["hidden_size"],
            norm_eps=text["rms_norm_eps"],
            attention=_attention_plan(text, index),
            moe=_moe_plan(text, text["n_routed_experts"], text["num_experts_per_tok"]),
            hyper=hyper,
            engram=engrams.get(index),
        )
        for index in range(num_layers)
    )
    stages = tuple(
        LayerPlan(
            name=f"mtp.{stage}",
            index=num_layers + stage,
            hidden_size=text["hidden_size"],
            norm_eps=text["rms_norm_eps"],
            attention=_attention_plan(text, num_layers + stage),
            moe=_moe_plan(text, text["dspark_n_routed_experts"], text["dspark_num_experts_per_tok"]),
            hyper=hyper,
            engram=None,
        )
        for stage in range(num_stages)
    )
    return ModelPlan(
        family=MODEL_TYPE,
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        norm_eps=text["rms_norm_eps"],
        max_positions=text["max_position_embeddings"],
        bos_token_id=config["bos_token_id"],
        eos_token_ids=eos_ids(config),
        quant=_quant_plan(config),
        layers=layers,
        hyper=hyper,
        head_mix=False,
        draft=_draft_plan(text, stages) if stages else None,
        ngrams=_ngram_plan(text) if engrams else None,
        skipped_prefixes=("vision.", "aligner.", "image_start", "image_end", "image_newline"),
        skipped_suffixes=(".gate.bias_vl",),
    )


def _quant_plan(config: Mapping[str, Any]) -> QuantPlan:
    settings = config.get("quantization_config")
    return quant_plan(settings, (settings or {}).get("expert_dtype"), Storage.FP8_ROW)


def _attention_plan(text: Mapping[str, Any], index: int) -> AttentionPlan:
    ratio = text["compress_ratios"][index]
    compression = _compression_plan(text, index, ratio) if ratio else None
    return attention_plan(text, compression, window_quant=_WINDOW_QUANT, normalise_query_heads=False)


def _compression_plan(text: Mapping[str, Any], index: int, ratio: int) -> CompressionPlan:
    source = max(layer for layer in text["kv_source_layer_ids"] if layer <= index)
    picker = max(layer for layer in text["index_source_layer_ids"] if layer <= index)
    owns = source == index
    return CompressionPlan(
        ratio=ratio,
        source_layer=source,
        compressor=CompressorPlan(text["head_dim"], ratio, overlap=False, position_bias=False) if owns else None,
        cache_quant=_COMPRESSED_QUANT,
        indexer=_indexer_plan(text, index, source) if picker == index else None,
        pick_layer=picker,
    )


def _indexer_plan(text: Mapping[str, Any], index: int, source: int) -> IndexerPlan:
    publisher = text.get("candidate_source_layer_id")
    candidates = None
    if publisher is not None and index >= publisher:
        candidates = CandidatePlan(
            publisher, index == publisher, text["candidate_block_size"], text["candidate_topk_blocks"]
        )
    return IndexerPlan(
        num_heads=text["index_n_heads"],
        head_dim=text["index_head_dim"],
        topk=text["index_topk"],
        key_layer=source,
        owns_keys=source == index,
        key_compressor=None,
        hadamard=False,
        cache_quant=_INDEX_QUANT,
        candidates=candidates,
    )


def _moe_plan(text: Mapping[str, Any], num_experts: int, topk: int) -> MoePlan:
    return MoePlan(
        hidden_size=text["hidden_size"],
        inner_size=text["moe_intermediate_size"],
        shared_size=text["moe_intermediate_size"],
        num_experts=num_experts,
        topk=topk,
        limit=text["swiglu_limit"],
        scaling=text["routed_scaling_factor"],
        normalise=topk > 1,
        sum_eps=1e-20,
        hash_vocab_size=0,
    )


def _draft_plan(text: Mapping[str, Any], stages: tuple[LayerPlan, ...]) -> DraftPlan:
    return DraftPlan(
        stages=stages,
        block_size=text["dspark_block_size"],
        noise_token_id=text["dspark_noise_token_id"],
        markov_rank=text["dspark_markov_rank"],
        target_layer_ids=tuple(sorted(text["dspark_target_layer_ids"])),
        captures_output=False,
        markov_embed="embed",
        markov_head="head",
    )


def _ngram_plan(text: Mapping[str, Any]) -> NgramPlan:
    return NgramPlan(text["engram_max_ngram_size"], text["engram_pad_token_id"], text["engram_compressed_vocab_size"])
