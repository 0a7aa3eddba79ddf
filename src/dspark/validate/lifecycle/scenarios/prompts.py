"""Prompts and sampling parameters that scenarios are made of."""

import random
from typing import Any

from dspark.config.sampling import SamplingParams
from dspark.validate.lifecycle.settings import EngineSettings
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish

# Hot enough that noise decides: drafter and target share it, so drafts of any model are often right.
HOT = 2.0


def prompt(subject: Subject, length: int, salt: int = 0) -> tuple[int, ...]:
    """Token ids drawn from (length, salt), always the same."""
    rng = random.Random(f"{length}/{salt}")
    return tuple(rng.randrange(subject.num_valid_tokens) for _ in range(length))


def wish(subject: Subject, length: int, salt: int = 0, **params: Any) -> Wish:
    """A request with a prompt of some length; it runs its full length unless told otherwise.

    It asks for logprobs, since a wrong row that draws the right token shows in them alone.
    """
    chosen = {"max_tokens": subject.max_output, "ignore_eos": True, "logprobs": 0, **params}
    return Wish(prompt(subject, length, salt), SamplingParams(**chosen))


def hot(subject: Subject, length: int, salt: int = 0, **params: Any) -> Wish:
    """A request whose drafts are often right and often wrong."""
    return wish(subject, length, salt, **{"temperature": HOT, "seed": salt, **params})


def settings(subject: Subject, max_num_seqs: int = 4, spare_rows: int = 16, **changes: Any) -> EngineSettings:
    """An engine at the model's full draft width, with some rows a step for prefill."""
    width = subject.block_size
    rows = max_num_seqs * (1 + width) + spare_rows
    chosen = {"num_speculative_tokens": width, **changes}
    return EngineSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=rows, **chosen)


def two_pages(subject: Subject) -> int:
    """A prompt length a little beyond two pages."""
    return 2 * subject.page_tokens + 3
