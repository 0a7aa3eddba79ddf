"""Held-out prompts by domain, cut from texts that the embedded model never saw in training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dspark.config.errors import DSparkError

DOMAINS = ("code", "docs", "math", "prose", "chat")
Message = dict[str, str]


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt and where it comes from.

    Args:
        domain: one of `DOMAINS`.
        name: unique, e.g. "code-3".
        source, licence: of the text.
        text: to be continued as it is, or None.
        messages: to be answered through the model's chat template; empty when there is a text.
    """

    domain: str
    name: str
    source: str
    licence: str
    text: str | None = None
    messages: tuple[Message, ...] = ()


def load_prompts(domains: Sequence[str] = DOMAINS, per_domain: int | None = None) -> list[BenchPrompt]:
    """The prompts of some domains, in a fixed order.

    Args:
        domains: names from `DOMAINS`.
        per_domain: the first so many of each; None takes all.

    Raises:
        DSparkError: a domain is unknown, or fewer than one prompt is asked for.
    """
    unknown = [domain for domain in domains if domain not in DOMAINS]
    if unknown:
        raise DSparkError(f"there are no prompts for {', '.join(unknown)}: the domains are {', '.join(DOMAINS)}")
    if per_domain is not None and per_domain < 1:
        raise DSparkError(f"at least one prompt per domain is needed, not {per_domain}")
    return [prompt for domain in domains for prompt in _read_domain(domain)[:per_domain]]


def _read_domain(domain: str) -> list[BenchPrompt]:
    lines = (files("dspark") / "assets" / "prompts" / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_as_prompt(domain, json.loads(line)) for line in lines]


def _as_prompt(domain: str, record: dict[str, Any]) -> BenchPrompt:
    messages = tuple(record.pop("messages", ()))
    return BenchPrompt(domain=domain, messages=messages, **record)
