"""Training text by domain: reads the corpus files and turns dialogues into messages with roles."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark.config.errors import DSparkError

DOMAINS: tuple[str, ...] = ("code", "docs", "chat", "math", "prose")
SPLITS: tuple[str, ...] = ("train", "heldout")

#: Speakers as the corpus writes them at the start of a line.
_ROLES = {"Topic": "system", "A": "user", "B": "assistant", "User": "user", "Assistant": "assistant"}
_SPEAKER = {
    "chitchat": re.compile(r"^(Topic|A|B): ", re.MULTILINE),
    "dialogue": re.compile(r"^(User|Assistant): ", re.MULTILINE),
}


@dataclass(frozen=True)
class Turn:
    """One message of a dialogue, or a whole document when role is None."""

    role: str | None
    text: str


@dataclass(frozen=True)
class Document:
    """One text of the corpus, cut into turns."""

    source: str
    turns: tuple[Turn, ...]


def corpus_file(folder: Path, split: str, domain: str) -> Path:
    """Return the path of one split of one domain.

    Raises:
        DSparkError: the file is not there.
    """
    path = folder / f"{split}-{domain}.jsonl.xz"
    if not path.is_file():
        raise DSparkError(f"corpus file {path} is missing: --corpus must name the folder of *.jsonl.xz files")
    return path


def read_documents(folder: Path, split: str, domain: str) -> Iterator[Document]:
    """Yield the documents of one split of one domain in file order.

    Raises:
        DSparkError: the file is missing, truncated or not one JSON object a line.
    """
    path = corpus_file(folder, split, domain)
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                yield parse_document(domain, record["source"], record["text"])
    except (lzma.LZMAError, EOFError, ValueError, KeyError, RecursionError) as error:
        raise DSparkError(f"corpus file {path} is damaged: {error}") from error


def parse_document(domain: str, source: str, text: str) -> Document:
    """Cut a chat or math text into its turns; every other domain stays one text.

    Args:
        domain: one of `DOMAINS`.
        source: the corpus's name of the origin; chitchat writes its speakers as A and B.
        text: the raw text.
    """
    if domain == "chat" and source == "chitchat":
        return Document(source, _split_turns(_SPEAKER["chitchat"], text))
    if domain in ("chat", "math"):
        return Document(source, _split_turns(_SPEAKER["dialogue"], text))
    return Document(source, (Turn(None, text),))


def _split_turns(speaker: re.Pattern[str], text: str) -> tuple[Turn, ...]:
    marks = list(speaker.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns = [
        Turn(_ROLES[mark.group(1)], _drop_repeated_answer(text[mark.end() : end].strip()))
        for mark, end in zip(marks, ends, strict=True)
    ]
    return tuple(turns) or (Turn(None, text),)


def _drop_repeated_answer(text: str) -> str:
    """Worked solutions state `#### 70` twice at the end; once is enough."""
    lines = text.split("\n")
    repeated = len(lines) > 1 and lines[-1] == lines[-2] and lines[-1].startswith("#### ")
    return "\n".join(lines[:-1]) if repeated else text


def sample_texts(folder: Path, bytes_per_domain: int, seed: int = 0, piece_chars: int = 40_000) -> Iterator[str]:
    """Yield a domain-balanced sample of the training text, for the tokenizer.

    Args:
        folder: the corpus.
        bytes_per_domain: UTF-8 bytes to take from each domain; a smaller domain is taken whole.
        seed: decides which documents.
        piece_chars: longer documents contribute a random piece of this many characters.
    """
    for index, domain in enumerate(DOMAINS):
        rng = np.random.default_rng((seed, index))
        documents = list(read_documents(folder, "train", domain))
        taken = 0
        for number in rng.permutation(len(documents)):
            for turn in documents[number].turns:
                start = int(rng.integers(0, max(1, len(turn.text) - piece_chars)))
                piece = turn.text[start : start + piece_chars]
                taken += len(piece.encode("utf-8"))
                yield piece
            if taken >= bytes_per_domain:
                break
