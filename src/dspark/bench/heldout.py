"""Prompts cut from a corpus's held-out documents: the beginning of a dialogue, or a passage out of a text."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Protocol

import numpy as np

from dspark.bench.prompts import BenchPrompt, Message
from dspark.config.errors import DSparkError

PROMPT_CHARS = 280
# A text must go on for so many characters behind the prompt, so that the model is asked for the middle of a text.
_REST_CHARS = 500
# Longest dialogue before the reply that is asked for.
_DIALOGUE_CHARS = 1200


class CorpusTurn(Protocol):
    """A message, or a whole text when there is no role."""

    @property
    def role(self) -> str | None:
        """ "system", "user", "assistant" or None."""
        ...

    @property
    def text(self) -> str:
        """What it says."""
        ...


class CorpusDocument(Protocol):
    """A text of the corpus."""

    @property
    def source(self) -> str:
        """Name of its origin."""
        ...

    @property
    def turns(self) -> Sequence[CorpusTurn]:
        """Its messages in order."""
        ...


def cut_prompts(domain: str, documents: Iterable[CorpusDocument], count: int, seed: int = 0) -> list[BenchPrompt]:
    """At most `count` prompts, one a document, sources taking turns.

    Args:
        domain: goes into the names.
        documents: all that are held out.
        count: >= 1.
        seed: decides which documents and where they are cut.

    Raises:
        DSparkError: no document is long enough.
    """
    rng = np.random.default_rng((seed, sum(domain.encode())))
    listed = list(documents)
    shuffled = [listed[number] for number in rng.permutation(len(listed))]
    prompts: list[BenchPrompt] = []
    for document in _alternate_sources(shuffled):
        if len(prompts) == count:
            break
        prompt = _cut(f"{domain}-{len(prompts) + 1}", domain, document, rng)
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise DSparkError(f"no held-out document of {domain} is long enough for a prompt")
    return prompts


def _alternate_sources(documents: Sequence[CorpusDocument]) -> Iterator[CorpusDocument]:
    """One document of each source, then a second of each, and so on."""
    by_source: dict[str, list[CorpusDocument]] = {}
    for document in documents:
        by_source.setdefault(document.source, []).append(document)
    for layer in zip_longest(*by_source.values()):
        yield from (document for document in layer if document is not None)


def _cut(name: str, domain: str, document: CorpusDocument, rng: np.random.Generator) -> BenchPrompt | None:
    """A prompt out of one document, or None where it is too short."""
    text: str | None = None
    messages: tuple[Message, ...] = ()
    if document.turns[0].role is None:
        text = _cut_passage(document.turns[0].text, rng)
    else:
        messages = _cut_dialogue(document.turns, rng)
    if not text and not messages:
        return None
    return BenchPrompt(domain, name, document.source, "of the corpus", text, messages)


def _cut_passage(text: str, rng: np.random.Generator) -> str | None:
    """About PROMPT_CHARS characters from the start of a line, ending before a blank."""
    latest = len(text) - PROMPT_CHARS - _REST_CHARS
    if latest <= 0:
        return None
    start = text.find("\n", int(rng.integers(0, latest))) + 1
    passage = text[start : start + PROMPT_CHARS]
    end = max(passage.rfind(" "), passage.rfind("\n"))
    return passage[:end].rstrip() or None


def _cut_dialogue(turns: Sequence[CorpusTurn], rng: np.random.Generator) -> tuple[Message, ...]:
    """Everything up to a message of the user that was answered; empty where there is none that is short enough."""
    lengths = np.cumsum([len(turn.text) for turn in turns])
    places = [
        place
        for place in range(len(turns) - 1)
        if turns[place].role == "user" and turns[place + 1].role == "assistant" and lengths[place] <= _DIALOGUE_CHARS
    ]
    if not places:
        return ()
    last = places[int(rng.integers(0, len(places)))]
    return tuple({"role": turn.role or "user", "content": turn.text} for turn in turns[: last + 1])
