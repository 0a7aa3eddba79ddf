"""A model under test: engines over it in any configuration, and the answer that each request gets alone."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dspark.config import Config, DSparkConfig, SpeculativeConfig
from dspark.config.errors import ConfigError, DSparkError
from dspark.config.sampling import SamplingParams
from dspark.config.speculative import DraftHealthConfig
from dspark.config.structured import StructuredOutput
from dspark.engine.assembly import Assembly, assemble, build_loop
from dspark.engine.core import Speculation
from dspark.engine.loop import EngineLoop
from dspark.engine.observer import RoundRecord
from dspark.models.build import read_plan
from dspark.scheduler.plan import PlannedSpan, StepPlan
from dspark.speculative.proposer import Proposer
from dspark.validate.lifecycle.any_lengths import AnyLengths
from dspark.validate.lifecycle.wishes import Answer, Wish, collect


@dataclass(frozen=True)
class Block:
    """A draft block: ids [G], and the confidence logits [G] that were computed with it, empty without such a head."""

    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]

    @classmethod
    def of(cls, record: RoundRecord) -> "Block":
        """The block that a round judged."""
        confidence = record.confidence_logits
        return cls(record.draft_ids, () if confidence is None else tuple(confidence.tolist()))


# Draft blocks by the position of their anchor.
Blocks = dict[int, Block]

# Rows of the oracle's passes: more than any prompt, so that each is prefilled in one.
_WHOLE_PROMPT = 8192


@dataclass(frozen=True)
class EngineSettings:
    """What differs between the engines of a run.

    Attributes:
        num_speculative_tokens: 0 decodes plainly.
        threshold: least survival that is verified; None verifies every draft.
        lengths_seed: draws verify lengths at random; None leaves them to the threshold.
        health_window: rounds over which draft health looks; None drafts whatever it gains.
        health_floor: mean accepted length at which drafting goes on.
    """

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_num_pages: int | None = None
    num_speculative_tokens: int = 5
    threshold: float | None = None
    lengths_seed: int | None = None
    health_window: int | None = None
    health_floor: float = 1.7
    enable_prefix_caching: bool = True
    prefix_cache_interval: int | None = None
    prefix_cache_bytes: int = 2**26

    def as_json(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """As the engine's configuration spells it."""
        if self.num_speculative_tokens == 0:
            return None
        schedule: Literal["fixed", "threshold"] = "fixed" if self.threshold is None else "threshold"
        lengths = DSparkConfig(schedule=schedule, draft_confidence_threshold=self.threshold)
        return SpeculativeConfig(
            num_speculative_tokens=self.num_speculative_tokens, dspark_config=lengths, draft_health=self.health
        )

    @property
    def health(self) -> DraftHealthConfig | None:
        """Rules so quick that drafting stops and starts again within one request."""
        if self.health_window is None:
            return None
        window, floor = self.health_window, self.health_floor
        return DraftHealthConfig(floor, floor, window, probe_after=6, probe_rounds=max(window // 2, 1))


class Oracle:
    """Each request decoded alone: one request, one token a step, no drafts, no cache. Answers are kept."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._answers: dict[tuple[tuple[int, ...], str], Answer] = {}
        self.num_steps = 0

    @property
    def num_answers(self) -> int:
        """Different requests answered."""
        return len(self._answers)

    def answer(self, wish: Wish) -> Answer:
        """What the request gives."""
        key = wish.key
        if key not in self._answers:
            self._answers[key] = self._decode(wish)
        return self._answers[key]

    def _decode(self, wish: Wish) -> Answer:
        self._loop.add("alone", wish.prompt_ids, wish.params)
        emissions = []
        while self._loop.has_work:
            emissions += self._loop.step()
            self.num_steps += 1
        return collect(emissions)


class DraftOracle:
    """Draft blocks of a request alone, one at each of its anchors: every token is decoded with a block pending."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._engine = loop.engine
        self._engine.observer = self
        self._blocks: dict[tuple[tuple[int, ...], str], Blocks] = {}
        self._seen: Blocks = {}

    def observe(self, record: RoundRecord) -> None:
        """Keep a block; called by the engine."""
        self._seen[record.anchor_position] = Block.of(record)

    def blocks(self, wish: Wish) -> Blocks:
        """All of a request's blocks."""
        if wish.key not in self._blocks:
            self._blocks[wish.key] = self._draft(wish)
        return self._blocks[wish.key]

    def _draft(self, wish: Wish) -> Blocks:
        self._seen = {}
        request = self._engine.add("alone", wish.prompt_ids, wish.params, self._loop.max_model_len)
        self._engine.start("alone")
        while request.finish_reason is None:
            self._engine.step(StepPlan((PlannedSpan("alone", request.num_pending),)))
        self._engine.remove("alone")
        return self._seen


class Subject:
    """A model under test.

    Args:
        name: for the report.
        folder: checkpoint; None is the embedded model.
        max_model_len: tokens of a request at most.
        max_output: tokens that its requests generate at most: slow models get short requests.
    """

    def __init__(self, name: str, folder: Path | None, max_model_len: int, max_output: int) -> None:
        self.name = name
        self.folder = folder
        self.max_output = max_output
        self._wanted_len = max_model_len
        alone = EngineSettings(1, _WHOLE_PROMPT, num_speculative_tokens=0, enable_prefix_caching=False)
        plain = self.assemble(alone)
        self.oracle = Oracle(plain.loop)
        self.tokenizer = plain.tokenizer
        self.max_model_len = plain.max_model_len
        self.num_valid_tokens = plain.loop.engine.num_valid_tokens
        self.eos_token_ids = tuple(plain.plan.eos_token_ids)
        self.device = torch.device(plain.device)
        self.page_tokens = plain.loop.engine.state.page_tokens
        self.has_grammar = self._has_grammar(plain.loop)
        draft = read_plan(plain.folder).draft
        self.block_size = draft.block_size if draft else 0
        drafting = replace(alone, num_speculative_tokens=self.block_size)
        self._drafts = DraftOracle(self.loop(drafting)) if self.block_size else None

    @staticmethod
    def _has_grammar(loop: EngineLoop) -> bool:
        """Whether outputs can be given a form: the grammar library is there and knows this tokenizer."""
        try:
            loop.add("form", [0], SamplingParams(structured=StructuredOutput.choice(["yes", "no"])))
        except ConfigError:
            return False
        return loop.abort("form")

    def assemble(self, settings: EngineSettings) -> Assembly:
        """A fresh engine, through the same door as every user: admission, weights, tokenizer, loop."""
        config = Config(
            model=str(self.folder) if self.folder else None,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=self._wanted_len,
            max_num_pages=settings.max_num_pages,
            enable_prefix_caching=settings.enable_prefix_caching,
            prefix_cache_interval=settings.prefix_cache_interval,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            speculative_config=settings.speculation,
        )
        return assemble(config=config)

    def loop(self, settings: EngineSettings) -> EngineLoop:
        """The loop of a fresh engine."""
        assembly = self.assemble(settings)
        if settings.lengths_seed is None or settings.num_speculative_tokens == 0:
            return assembly.loop
        return _rebuilt(assembly, replace(assembly.speculation, lengths=AnyLengths(settings.lengths_seed)))

    def drafts_of(self, wish: Wish) -> Blocks | None:
        """The blocks of a request alone, at the model's full width; None where it has no draft stages."""
        return self._drafts.blocks(wish) if self._drafts else None

    def loop_with(self, settings: EngineSettings, proposer: Proposer) -> EngineLoop:
        """The loop of a fresh engine with another drafter than the checkpoint's."""
        plain = self.assemble(replace(settings, num_speculative_tokens=0))
        return _rebuilt(plain, Speculation(proposer.num_speculative_tokens, proposer=proposer))

    def encode(self, text: str) -> list[int]:
        """Ids of a text that are in the vocabulary."""
        return [token for token in self.tokenizer.encode(text) if token < self.num_valid_tokens]


def _rebuilt(assembly: Assembly, speculation: Speculation) -> EngineLoop:
    """An engine over the weights of an assembly that speculates in a way no configuration spells."""
    model, device = assembly.loop.engine.model, torch.device(assembly.device)
    return build_loop(model, assembly.tokenizer, assembly.config, speculation, assembly.max_model_len, device)


class NotExercisedError(DSparkError):
    """A scenario ran without the event that it is named after, so it proved nothing."""


def require(evidence: bool, event: str) -> None:
    """Refuse to call a scenario passed that did not see its event."""
    if not evidence:
        raise NotExercisedError(f"it did not happen that {event}")
