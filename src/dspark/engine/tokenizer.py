"""The tokenizer of a checkpoint folder: text to ids and back, end-of-sequence ids, chat template."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dspark.config.errors import CheckpointError


class TextTokenizer:
    """tokenizer.json of a folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json: add the file of the model's release")
        try:
            self._tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:
            raise CheckpointError(f"{path} is not a tokenizer file ({error}): fetch it again") from error
        self.folder = folder
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # One more than the largest id, since ids may have holes.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens may be spelt out, none is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, which may name more of them than config.json; () without one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a JSON object ({error}): fetch it again") from error
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    wrong = [value for value in ids if isinstance(value, bool) or not isinstance(value, int)]
    if wrong:
        raise CheckpointError(f"{path}: eos_token_id holds {wrong[0]!r}, which is no token id; fetch it again")
    return tuple(ids)
