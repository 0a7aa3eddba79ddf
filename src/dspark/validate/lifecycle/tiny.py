"""Two tiny random models as checkpoint folders: few and narrow layers, so that a long run takes many steps.

Together they hold every kind of store: windows, open groups with and without overlap, compressed rows, index keys of
both kinds, and a draft window. Their weights say nothing; the draft's Markov head is made of the target's embedding and
head, so that drafts are often right and often wrong.
"""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from dspark.checkpoint import TensorPlan, write_checkpoint
from dspark.layers.plans import ModelPlan
from dspark.models.engram_tables import engram_row_counts
from dspark.models.engram_vocabulary import compressed_ids
from dspark.models.inventory import expected_tensors
from dspark.models.registry import parse_config

TINY_NAMES = ("shared-rows", "own-rows")

_SPECIAL = ("<bos>", "<eos>", "<pad>", "<noise>")
_PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es")
# Rows of embedding and head beyond the tokenizer's: ids that must never be drawn.
_PADDED_ROWS = 3
# What ranks divide.
_DIVIDED_SIZES = (
    "num_attention_heads",
    "o_groups",
    "moe_intermediate_size",
    "n_routed_experts",
    "dspark_n_routed_experts",
)
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
# How much a half adds to the residual streams: less makes a token follow from the one before it, which the Markov head
# knows; more makes it depend on everything else, which it does not.
_BRANCH_GAIN = 0.4
_LOGIT_GAIN = 3.0


def write_tiny_checkpoint(folder: Path, name: str, seed: int = 0, ranks: int = 1) -> Path:
    """Write one of `TINY_NAMES` with weights drawn from a seed; the folder must not exist.

    Args:
        ranks: make it so much wider that each of them holds as much as one rank holds of the narrow model.
    """
    tokenizer = tiny_tokenizer()
    config = _config(name, tokenizer, ranks)
    plan = parse_config(config)
    contents = {"config.json": json.dumps(config).encode(), "tokenizer.json": tokenizer.to_str().encode()}
    return write_checkpoint(folder, _tensors(plan, seed), files=contents)


def tiny_tokenizer() -> Tokenizer:
    """Printable ASCII, a few pairs of letters, and a letter of two bytes that are tokens of their own."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©"]
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *letters, *_PAIRS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in _PAIRS]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return tokenizer


def _config(name: str, tokenizer: Tokenizer, ranks: int = 1) -> dict[str, Any]:
    """The packaged config.json with the sizes that follow from the tokenizer and the ranks."""
    file = Path(str(files("dspark"))) / "assets" / "tiny" / f"{name}.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text["vocab_size"] = -(-(tokenizer.get_vocab_size() + _PADDED_ROWS) // ranks) * ranks
    for size in _DIVIDED_SIZES:
        if size in text:
            text[size] *= ranks
    if "engram_layer_ids" in text:
        text["engram_compressed_vocab_size"] = int(compressed_ids(tokenizer, text["vocab_size"]).max()) + 1
        text["engram_num_embeddings"] = engram_row_counts(text)
    return config


def _tensors(plan: ModelPlan, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights in the order of the inventory."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {tensor.name: _draw(tensor, generator) for tensor in expected_tensors(plan)}
    if plan.draft is not None:
        _know_the_target(drawn, plan)
    for tensor in expected_tensors(plan):
        values = drawn[tensor.name]
        yield tensor.name, values if tensor.dtype == "I64" else values.to(_DTYPES[tensor.dtype])


def _draw(tensor: TensorPlan, generator: torch.Generator) -> Tensor:
    name, shape = tensor.name, tensor.shape
    if tensor.dtype == "I64":  # the experts of each token
        return torch.rand(shape[0], 4, generator=generator).argsort(-1)[:, : shape[1]].contiguous()
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.2 * values
    if name.endswith(("q_weight", "k_weight")):
        return 1.0 + 0.5 * values
    if name.endswith(("attn_sink", "bias", "ape", "_base", "_scale")):
        return 0.5 * values
    if "embed" in name:
        return values
    return _gain(name) * values * shape[-1] ** -0.5


def _gain(name: str) -> float:
    if name == "head.weight":
        return _LOGIT_GAIN
    return _BRANCH_GAIN if name.endswith(("wo_b.weight", "w2.weight", "engram.wkv.weight")) else 1.0


def _know_the_target(drawn: dict[str, Tensor], plan: ModelPlan) -> None:
    """Let the Markov head say what the target would say after a token if nothing else mattered."""
    assert plan.draft is not None
    last = f"{plan.draft.stages[-1].name}."
    drawn[f"{last}markov_head.{plan.draft.markov_embed}.weight"] = drawn["embed.weight"].clone()
    drawn[f"{last}markov_head.{plan.draft.markov_head}.weight"] = drawn["head.weight"].clone()
    drawn[f"{last}norm.weight"] = 0.3 * drawn[f"{last}norm.weight"]
