"""The embedded model's byte-level BPE: special tokens, training, and the files of the official layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark.config.errors import DSparkError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
NOISE = "<|noise|>"
NUM_RESERVED = 8

#: Position in this tuple is the token id; a trained checkpoint depends on the order.
SPECIAL_TOKENS: tuple[str, ...] = (
    BOS,
    EOS,
    PAD,
    SYSTEM,
    USER,
    ASSISTANT,
    END,
    NOISE,
    *(f"<|reserved_{i}|>" for i in range(NUM_RESERVED)),
)
TOKEN_ID: dict[str, int] = {token: index for index, token in enumerate(SPECIAL_TOKENS)}

MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
MAX_VOCAB = 32_768  # token ids are kept as int16

#: Words take one leading non-letter (space, dot, underscore), digits stand alone so that
#: arithmetic sees place values, punctuation runs swallow the line end that follows them.
_SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Every message is closed by END; a document additionally ends with EOS.
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('roles are system, user and assistant, not ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def new_tokenizer() -> Tokenizer:
    """Return an untrained byte-level BPE with this project's splitting rule."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Learn the merges of a byte-level BPE from texts.

    Args:
        texts: training sample; its balance over domains decides whose words become tokens.
        vocab_size: entries including 256 bytes and the special tokens, [272, 32768].

    Returns:
        A tokenizer whose ids 0..15 are `SPECIAL_TOKENS`. It adds no bos or eos by itself.

    Raises:
        DSparkError: vocab_size is out of range, or the sample is too small to fill it.
    """
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise DSparkError(f"vocab_size is {vocab_size}; choose {MIN_VOCAB} (bytes and special tokens) to {MAX_VOCAB}")
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DSparkError(
            f"the sample yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}: "
            "give more text or a smaller vocab_size"
        )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read tokenizer.json from a folder (or the file itself).

    Raises:
        DSparkError: the file is missing, unreadable, or lacks this project's special tokens.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DSparkError(f"no tokenizer at {file}: run `dspark train tokenizer` first")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception on bad JSON
        raise DSparkError(f"{file} is not a readable tokenizer: {error}") from error
    wrong = [token for token, index in TOKEN_ID.items() if tokenizer.token_to_id(token) != index]
    if wrong:
        raise DSparkError(f"{file} lacks the special tokens {', '.join(wrong)} at their ids")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_model_len: int = 4096) -> list[Path]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json as the official layout has them.

    Args:
        tokenizer: what `train_tokenizer` returned.
        folder: created if missing.
        max_model_len: `model_max_length` of the tokenizer's config, in tokens.

    Returns:
        The paths written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(max_model_len))
    _write_json(folder / "generation_config.json", generation_config())
    return [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")]


def tokenizer_config(max_model_len: int) -> dict[str, object]:
    """Return the contents of tokenizer_config.json."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict[str, object]:
    """Return the contents of generation_config.json; a reply ends at EOS or at the end of its message."""
    return {
        "_from_model_config": True,
        "bos_token_id": TOKEN_ID[BOS],
        "eos_token_id": [TOKEN_ID[EOS], TOKEN_ID[END]],
        "pad_token_id": TOKEN_ID[PAD],
        "do_sample": False,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
