"""Small random models as checkpoint folders, with a tokenizer of fewer words than the model has rows."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from dspark.checkpoint import write_checkpoint
from dspark.models.inventory import expected_tensors
from dspark.models.names import place_of, view_of
from support.tiny_models import NUM_VALID, tiny_config, tiny_model

FAMILY = "v4"
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, with_draft: bool = True, **settings: Any) -> Path:
    """A model without Engram, in bf16; its last rows of the vocabulary have no token.

    Args:
        folder: created.
        seed: of the weights.
        with_draft: also the draft stages.
        settings: replace entries of config.json, without a change of shapes.
    """
    model = tiny_model(FAMILY, seed=seed)
    config = tiny_config(FAMILY) | settings
    if not with_draft:
        config["compress_ratios"] = config["compress_ratios"][: config["num_hidden_layers"]]
    plans = expected_tensors(model.plan, with_draft=with_draft)
    tensors = ((plan.name, view_of(place_of(plan.name), model).to(_DTYPES[plan.dtype])) for plan in plans)
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": word_tokenizer().to_str().encode()}
    return write_checkpoint(folder, tensors, files=files)


def word_tokenizer(num_words: int = NUM_VALID) -> Tokenizer:
    """Words w0, w1, ... between spaces."""
    vocabulary = {f"w{number}": number for number in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def copy_checkpoint(source: Path, target: Path) -> Path:
    """The same files in another folder."""
    return Path(shutil.copytree(source, target))
