"""Write a trained model in the official on-disk layout, with the stored values that training has already seen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.checkpoint.formats import quantise_fp4, quantise_fp8
from dspark.checkpoint.plan import TensorPlan
from dspark.checkpoint.write import write_checkpoint
from dspark.models.inventory import expected_tensors
from dspark.models.names import place_of, view_of
from dspark.train.drafter import TrainingDrafter
from dspark.train.target import TrainingTarget
from dspark.train.twins import stored_values

MAX_SHARD_BYTES = 12 * 2**20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class _Pair(nn.Module):
    """Target and draft under the names that `models.names` knows."""

    def __init__(self, target: nn.Module, draft: nn.Module | None) -> None:
        super().__init__()
        self.target = target
        self.draft = draft


def export_model(target: TrainingTarget, drafter: TrainingDrafter | None, folder: Path, tokenizer_folder: Path) -> None:
    """Write config.json, shards, index and tokenizer files; without a drafter the stages are left out.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    config = _exported_config(target.config, drafter)
    pair = _Pair(target.model, drafter.model if drafter else None)
    plan = drafter.plan if drafter else target.plan
    plans = expected_tensors(plan, with_draft=drafter is not None)
    files = {name: (tokenizer_folder / name).read_bytes() for name in TOKENIZER_FILES}
    files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    write_checkpoint(folder, _stored_tensors(pair, plans), files=files, max_shard_bytes=MAX_SHARD_BYTES, overwrite=True)


def _exported_config(config: dict[str, Any], drafter: TrainingDrafter | None) -> dict[str, Any]:
    text = dict(config["text_config"])
    num_stages = len(drafter.plan.draft.stages) if drafter and drafter.plan.draft else 0
    text["num_nextn_predict_layers"] = num_stages
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"] + num_stages]
    if drafter:
        text["dspark_block_size"] = drafter.block_size
    return {**config, "text_config": text}


def _stored_tensors(model: nn.Module, plans: list[TensorPlan]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every planned tensor in its storage dtype; scales follow their weights."""
    scales = {plan.scale for plan in plans if plan.scale}
    for plan in plans:
        if plan.name in scales:
            continue
        values = view_of(place_of(plan.name), model).detach().cpu().float()
        yield from _encode(plan, values)


def _encode(plan: TensorPlan, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    if plan.encoding == "plain":
        dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[plan.dtype]
        yield plan.name, values.to(dtype).contiguous()
        return
    assert plan.scale is not None
    if plan.encoding == "fp4":
        codes, scale = quantise_fp4(stored_values(values, "fp4_group"))
    else:
        assert plan.block is not None
        storage = "fp8_row" if plan.block[0] == 1 else "fp8_block"
        codes, scale = quantise_fp8(stored_values(values, storage), plan.block)
    yield plan.name, codes
    yield plan.scale, scale
