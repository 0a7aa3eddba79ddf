"""Small random checkpoints that two or four ranks can divide, in bf16 and in coded weights, of both families."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoint import write_checkpoint
from dspark.checkpoint.formats import quantise_fp4, quantise_fp8
from dspark.checkpoint.plan import TensorPlan
from dspark.models.build import Model
from dspark.models.engram_tables import engram_row_counts
from dspark.models.engram_vocabulary import compressed_ids
from dspark.models.inventory import expected_tensors
from dspark.models.names import place_of, view_of
from dspark.models.registry import parse_config
from support.tiny_checkpoints import word_tokenizer
from support.tiny_models import VOCAB, fill_randomly, tiny_config

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
_SIZES = {
    "num_attention_heads": 8,
    "o_groups": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}


def divisible_config(family: str, quantised: bool = False) -> dict[str, Any]:
    """The small configuration with more heads, groups and experts; 8 ranks cannot divide the output groups."""
    config = tiny_config(family, quantised)
    text = config.get("text_config", config)
    text.update(_SIZES)
    if family == "v41":
        text.update(dspark_n_routed_experts=4, dspark_num_experts_per_tok=2)
        text["engram_compressed_vocab_size"] = int(compressed_ids(word_tokenizer(), VOCAB).max()) + 1
        text["engram_num_embeddings"] = engram_row_counts(text)
    return config


def write_divisible_checkpoint(folder: Path, family: str, quantised: bool = False, seed: int = 0) -> Path:
    """A checkpoint of random weights in `folder`, which is created."""
    config = divisible_config(family, quantised)
    model = Model(parse_config(config))
    fill_randomly(model, seed)
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": word_tokenizer().to_str().encode()}
    return write_checkpoint(folder, _stored(model), files=files)


def _stored(model: Model) -> Iterator[tuple[str, Tensor]]:
    plans = expected_tensors(model.plan)
    scales = {plan.scale for plan in plans if plan.scale}
    for plan in plans:
        if plan.name not in scales:
            yield from _encoded(plan, view_of(place_of(plan.name), model))


def _encoded(plan: TensorPlan, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    if plan.scale is None:
        yield plan.name, values.to(_DTYPES[plan.dtype]).contiguous()
        return
    assert plan.block is not None
    codes, scale = quantise_fp4(values) if plan.encoding == "fp4" else quantise_fp8(values, plan.block)
    yield plan.name, codes
    yield plan.scale, scale
