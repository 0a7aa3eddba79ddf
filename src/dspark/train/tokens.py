"""Documents to token ids: one flat array a domain, with the place where each document begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dspark.config.errors import DSparkError
from dspark.train.corpus import DOMAINS, Document, read_documents
from dspark.train.tokenizer import BOS, END, EOS, TOKEN_ID

#: Turns encoded in one call of the tokenizer library, which spreads them over its threads.
_TURNS_PER_CALL = 4096


@dataclass(frozen=True)
class TokenArray:
    """The documents of one split of one domain, one after the other.

    Attributes:
        token_ids: [N] int16, each document as bos ... eos.
        starts: [documents] int64, ascending; starts[0] is 0.
        num_bytes: UTF-8 bytes of the texts behind the tokens, special tokens not counted.
    """

    token_ids: np.ndarray
    starts: np.ndarray
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / max(1, self.num_tokens)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> TokenArray:
    """Encode documents in the chat template's token order: bos, (role, text, end)*, eos.

    The texts themselves can never produce a special token: source code that spells one out is
    encoded as plain characters.

    Args:
        tokenizer: with this project's special tokens; vocabulary below 32768.
        documents: consumed once.

    Raises:
        DSparkError: there is no document.
    """
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    pieces: list[np.ndarray] = []
    lengths: list[int] = []
    num_bytes = 0
    for batch in _batches_of_turns(documents):
        texts = [turn.text for document in batch for turn in document.turns]
        num_bytes += sum(len(text.encode("utf-8")) for text in texts)
        encoded = iter(plain.encode_batch_fast(texts, add_special_tokens=False))
        for document in batch:
            token_ids = _document_ids(document, encoded)
            pieces.append(np.array(token_ids, dtype=np.int16))
            lengths.append(len(token_ids))
    if not pieces:
        raise DSparkError("the corpus holds no document: check the files of --corpus")
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
    return TokenArray(np.concatenate(pieces), starts, num_bytes)


def _batches_of_turns(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    turns = 0
    for document in documents:
        batch.append(document)
        turns += len(document.turns)
        if turns >= _TURNS_PER_CALL:
            yield batch
            batch, turns = [], 0
    if batch:
        yield batch


def _document_ids(document: Document, encoded: Iterator) -> list[int]:
    token_ids = [TOKEN_ID[BOS]]
    for turn in document.turns:
        ids = next(encoded).ids
        token_ids += ids if turn.role is None else [TOKEN_ID[f"<|{turn.role}|>"], *ids, TOKEN_ID[END]]
    token_ids.append(TOKEN_ID[EOS])
    return token_ids


def load_split(
    corpus: Path, tokenizer: Tokenizer, split: str, domains: Sequence[str] = DOMAINS, limit: int | None = None
) -> dict[str, TokenArray]:
    """Read and encode one split of the corpus.

    Args:
        corpus: folder of `{split}-{domain}.jsonl.xz`.
        tokenizer: see `encode_documents`.
        split: "train" or "heldout".
        domains: which domains.
        limit: first documents of each domain only; None takes all.

    Returns:
        A token array for each domain, in the order of `domains`.
    """
    return {
        domain: encode_documents(tokenizer, itertools.islice(read_documents(corpus, split, domain), limit))
        for domain in domains
    }


def limit_tokens(array: TokenArray, max_tokens: int, seed: int = 0) -> TokenArray:
    """Keep a random choice of whole documents that holds at most max_tokens (at least one document)."""
    if array.num_tokens <= max_tokens:
        return array
    ends = np.append(array.starts[1:], array.num_tokens)
    order = np.random.default_rng(seed).permutation(len(array.starts))
    kept = int(np.searchsorted(np.cumsum((ends - array.starts)[order]), max_tokens, side="right"))
    chosen = np.sort(order[: max(1, kept)])
    lengths = (ends - array.starts)[chosen]
    token_ids = np.concatenate([array.token_ids[array.starts[i] : ends[i]] for i in chosen])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
    return TokenArray(token_ids, starts, round(array.num_bytes * len(token_ids) / array.num_tokens))
