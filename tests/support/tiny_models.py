"""Small random models of both families, built in memory: every kind of layer, a window of 8, and tokens that vary.

Weights are random but rounded to bfloat16, like those of a checkpoint. Nothing here says that a number is right;
these models serve comparisons of a model with itself.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import torch

from dspark.models.build import Model
from dspark.models.engram_tables import engram_row_counts
from dspark.models.registry import parse_config
from dspark.ops.opset import ops_for
from dspark.state import geometry
from dspark.state.model_state import ModelState

FAMILIES = ("v41", "v4")
VOCAB = 80
WINDOW = 8
BLOCK = 5
EOS = 1
NOISE = VOCAB - 1
# The last ids of a padded vocabulary: no text, never drawn.
NUM_VALID = VOCAB - 4
MAX_LEN = 96

_YARN = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32}

_V41: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "text_config": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 1,
        "swiglu_limit": 2.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 512,
        "rope_theta": 10000,
        "rope_scaling": _YARN,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "index_n_heads": 3,
        "index_head_dim": 32,
        "index_topk": 5,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 3,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1],
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 40,
        "engram_n_heads": 2,
        "engram_head_dim": 16,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": VOCAB,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": [2, 4, 5],
        "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 3,
        "dspark_num_experts_per_tok": 1,
    },
}

_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "num_attention_heads": 3,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 1,
    "swiglu_limit": 2.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000,
    "rope_scaling": _YARN,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "sliding_window": WINDOW,
    "compress_ratios": [0, 4, 8, 4, 0, 0],
    "compress_rope_theta": 160000,
    "index_n_heads": 3,
    "index_head_dim": 32,
    "index_topk": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "dspark_block_size": BLOCK,
    "dspark_noise_token_id": NOISE,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 16,
}


def tiny_config(family: str, quantised: bool = False) -> dict[str, Any]:
    """A config.json of one family; quantised plans round activations to fp8 in groups of 32."""
    config = copy.deepcopy(_V41 if family == "v41" else _V4)
    if quantised:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [32, 32],
            "expert_dtype": "fp4",
        }
    if family == "v41":
        text = config["text_config"]
        text["engram_num_embeddings"] = engram_row_counts(text)
    return config


@cache
def tiny_model(
    family: str, quantised: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> Model:
    """A model with seeded random weights on a device; built once, never changed."""
    ops = ops_for(torch.device(device))
    model = Model(parse_config(tiny_config(family, quantised)), ops, dtype)
    fill_randomly(model, seed)
    return model.to(device).eval()


def fill_randomly(model: Model, seed: int) -> None:
    """Seeded random weights, routes and tokens of n-grams."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(_scaled(name, values).to(torch.bfloat16).float())
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            num_experts = model.plan.layers[0].moe.num_experts
            experts = torch.rand(buffer.shape[0], num_experts, generator=generator).argsort(-1)
            buffer.copy_(experts[:, : buffer.shape[1]])
        elif name.endswith("token_map"):
            buffer.copy_(torch.arange(VOCAB) // 2 * 2)


def _scaled(name: str, values: torch.Tensor) -> torch.Tensor:
    """Random numbers of a size that keeps every part of the model alive, and the next token undecided."""
    if "norm" in name:
        return 1.0 + 0.2 * values
    if name.endswith(("q_weight", "k_weight")):
        return 1.0 + 0.5 * values
    if name.endswith(("attn_sink", "bias", "ape", ".base", ".scale")):
        return 0.5 * values
    if "embed" in name:
        return values
    gain = 3.0 if name == "target.head.weight" else 1.0
    return gain * values * values.shape[-1] ** -0.5


def tiny_state(
    model: Model,
    num_slots: int = 4,
    num_pages: int = 64,
    max_query_len: int = BLOCK + 1,
    page_tokens: int = 8,
    garbage: float | None = float("nan"),
    num_ring_rows: int | None = None,
    max_rewind: int = 0,
    max_ahead: int = 0,
) -> ModelState:
    """Stores with small pages, so that requests of a few tokens cross them, filled with `garbage` beforehand.

    Quantised models keep bfloat16 rows whatever their activations are, as an engine does by default.
    """
    dtype = torch.bfloat16 if model.plan.quant.block else model.target.dtype
    with mock.patch.object(geometry, "_SMALLEST_PAGE_TOKENS", page_tokens):
        state = ModelState(
            model.plan,
            num_slots,
            num_pages,
            max_query_len,
            dtype,
            model.target.embed.weight.device,
            num_ring_rows=num_ring_rows,
            max_rewind=max_rewind,
            max_ahead=max_ahead,
        )
    if garbage is not None:
        for store in (*state.rings.values(), *state.appends.values()):
            store.fill_(garbage)
    return state


class LetterTokenizer:
    """One character a token, with the difficulties of real ones: ids with no character, with two, with half of one.

    Args:
        open_ids: ids that are the first half of a character: at the end they decode to a replacement character.
    """

    vocab_size = NUM_VALID

    def __init__(self, open_ids: Sequence[int] = (7, 23)) -> None:
        self.open_ids = frozenset(open_ids)

    def definition(self) -> Any:
        """The vocabulary for the grammar library; half a character counts as the whole."""
        return LetterVocabulary(self)

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for place, token in enumerate(token_ids):
            if token in (0, EOS):
                continue
            if token in self.open_ids:
                if place + 1 == len(token_ids):
                    pieces.append("\N{REPLACEMENT CHARACTER}")
                else:
                    pieces.append("\N{LATIN SMALL LETTER E WITH ACUTE}")
            elif token % 11 == 5:
                pieces.append(chr(48 + token) + "_")
            else:
                pieces.append(chr(48 + token))
        return "".join(pieces)


class LetterVocabulary:
    """The letters as the grammar library wants a vocabulary."""

    is_tokenizer_wrapper = True
    eos_token_id = EOS
    bos_token_id = 0
    special_token_ids = (0, EOS)

    def __init__(self, letters: LetterTokenizer) -> None:
        self.tokens = [b"<bos>", b"<eos>"]
        for token in range(2, letters.vocab_size):
            self.tokens.append(letters.decode([token, 0]).encode())

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text.encode() if isinstance(text, str) else text
        return [self.tokens.index(bytes([byte])) for byte in whole]
