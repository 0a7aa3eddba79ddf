"""What the rules of admission look at: the settings, and what is known of model, machine and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark.config.facts import EngineFacts, HardwareFacts, ModelFacts

if TYPE_CHECKING:
    from dspark.config.engine import Config
    from dspark.config.speculative import SpeculativeConfig


@dataclass(frozen=True)
class Question:
    """One configuration before the rules."""

    config: Config
    facts: ModelFacts
    draft: ModelFacts | None
    hardware: HardwareFacts | None
    engine: EngineFacts | None

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return self.config.speculative_config

    @property
    def width(self) -> int:
        return self.config.draft_width(self.facts)


Rule = Callable[[Question], Iterator[str]]


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 rank", "4 ranks"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
