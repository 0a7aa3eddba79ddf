"""The configuration of the small model that ships with the project: every kind of layer of its family, in small."""

from typing import Any

from dspark.models.registry import EMBEDDED_ARCHITECTURE, EMBEDDED_MODEL_TYPE

VOCAB_SIZE = 4096


def embedded_config(noise_token_id: int, compressed_vocab_size: int, engram_rows: tuple[int, int]) -> dict[str, Any]:
    """config.json of the embedded model in the official layout.

    Layers: 0-1 window only (1 with Engram), 2 a ratio-2 source, 3 sharing it, 4 a ratio-1 source that publishes
    candidates (with Engram), 5 sharing it, 6 re-indexing within the candidates, 7 sharing those picks.

    Args:
        noise_token_id: the tokenizer's noise token.
        compressed_vocab_size: ids of the Engram token map.
        engram_rows: table rows of the two Engram layers, see `engram_row_counts`.
    """
    return {
        "architectures": [EMBEDDED_ARCHITECTURE],
        "model_type": EMBEDDED_MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {
            **_TEXT,
            "dspark_noise_token_id": noise_token_id,
            "engram_num_embeddings": list(engram_rows),
            "engram_compressed_vocab_size": compressed_vocab_size,
        },
        "vision_config": {"model_type": f"{EMBEDDED_MODEL_TYPE}_vision", "num_hidden_layers": 0},
    }


_TEXT: dict[str, Any] = {
    "model_type": f"{EMBEDDED_MODEL_TYPE}_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 320,
    "moe_intermediate_size": 224,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_lora_rank": 96,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 512,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "compress_rope_theta": 40000,
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 128,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 4096,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def engram_settings() -> dict[str, Any]:
    """The Engram keys of the configuration, without the derived ones."""
    return {key: value for key, value in _TEXT.items() if key.startswith("engram_")}
