"""The tokenizer of a checkpoint folder: text to ids and back, end-of-sequence ids, chat template."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, decoders

from dspark.config.errors import CheckpointError

# Tokens that tell the parts of a reply apart. Whatever a tokenizer file calls them, they are part of the text: without
# them nobody could tell thoughts from the answer.
_MARKUP = frozenset({"<think>", "</think>", "｜DSML｜"})

# Characters that are encoded in a few milliseconds.
_LONG_TEXT = 4096


class TextTokenizer:
    """tokenizer.json of a folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json: add the file of the model's release")
        try:
            self._tokenizer = Tokenizer.from_str(_with_markup_as_text(path.read_text(encoding="utf-8")))
        except Exception as error:
            raise CheckpointError(f"{path} is not a tokenizer file ({error}): fetch it again") from error
        self.folder = folder
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # One more than the largest id, since ids may have holes.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = frozenset(added)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens may be spelt out, none is added."""
        return _encode(self._tokenizer, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a token of the chat format, whatever it spells."""
        return _encode(self._plain_tokenizer, text)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without encoding it; 0 where nothing is known."""
        return 0 if self._tokenizer.normalizer is not None else -(-len(text) // self._longest_token)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token; a letter of a byte-level vocabulary is at most one character."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """The tokenizer without the tokens that stand beside the vocabulary's words."""
        return Tokenizer.from_str(json.dumps({**json.loads(self._tokenizer.to_str()), "added_tokens": []}))

    def definition(self) -> str:
        """The tokenizer as the text of a tokenizer.json that neither pads nor truncates."""
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.no_padding()
        plain.no_truncation()
        text: str = plain.to_str()
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token by itself, which may be part of a character; a special token's are its name's."""
        spelling: str = self._tokenizer.id_to_token(token_id) or ""
        if token_id not in self._added_ids and isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return bytes(_BYTE_OF[letter] for letter in spelling)
        return (self.decode([token_id]) or spelling).encode()


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text. A long one is encoded as a batch of one, which lets the other threads of the program go on."""
    if len(text) < _LONG_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    else:
        (encoded,) = tokenizer.encode_batch([text], add_special_tokens=False)
        ids = encoded.ids
    return ids


def _with_markup_as_text(source: str) -> str:
    """A tokenizer file in which the tokens of a reply's markup are not special."""
    settings = json.loads(source)
    for token in settings.get("added_tokens") or ():
        token["special"] = token["special"] and token["content"] not in _MARKUP
    return json.dumps(settings)


def _byte_letters() -> dict[str, int]:
    """Letters of byte-level vocabularies: printable bytes are their own, the others follow U+0100 in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_letters()


def generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, which may name more of them than config.json; () without one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a JSON object ({error}): fetch it again") from error
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    wrong = [value for value in ids if isinstance(value, bool) or not isinstance(value, int)]
    if wrong:
        raise CheckpointError(f"{path}: eos_token_id holds {wrong[0]!r}, which is no token id; fetch it again")
    return tuple(ids)
