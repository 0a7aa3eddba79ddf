"""The compressed vocabulary of Engram: tokens whose text differs only in case, accents or spacing share one id."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from dspark.config.errors import CheckpointError
from dspark.layers.plans import ModelPlan

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Private-use character that carries a lone space through the strip.
_LONE_SPACE = "\ue000"
_NORMALISER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def read_token_map(folder: Path, plan: ModelPlan) -> Tensor:
    """Compressed id of every token id [V], from tokenizer.json.

    Raises:
        CheckpointError: no readable tokenizer.json, or its compressed vocabulary is not of the size in config.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and the Engram layers hash its vocabulary: add the file"
        )
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise CheckpointError(f"{path} is not a tokenizer file ({error}): fetch it again") from error
    token_map = compressed_ids(tokenizer, plan.vocab_size)
    assert plan.ngrams is not None
    size = int(token_map.max()) + 1
    if size != plan.ngrams.compressed_vocab_size:
        raise CheckpointError(
            f"{path} compresses to {size} ids, engram_compressed_vocab_size is {plan.ngrams.compressed_vocab_size}: "
            "the tokenizer belongs to another checkpoint"
        )
    return token_map


def compressed_ids(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """[V] int64; ids are numbered by first appearance. Ids beyond the tokenizer's vocabulary get one each."""
    seen: dict[str, int] = {}
    ids = []
    for token_id in range(vocab_size):
        key = _token_key(tokenizer, token_id)
        ids.append(seen.setdefault(key, len(seen)))
    return torch.tensor(ids, dtype=torch.int64)


def _token_key(tokenizer: Tokenizer, token_id: int) -> str:
    """The text that decides which tokens are one: decoded alone, normalised; the raw token where that fails."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if _REPLACEMENT in text:
        return tokenizer.id_to_token(token_id) or f"\0{token_id}"
    return normalise_text(text) or text


def normalise_text(text: str) -> str:
    """NFKC, NFD, accents stripped, lower case, runs of space collapsed, ends stripped; a lone space survives."""
    normalised: str = _NORMALISER.normalize_str(text)
    return normalised
