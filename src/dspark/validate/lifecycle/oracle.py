"""What each request gives alone: its answer without drafts, and its draft blocks. Both are kept."""

from dataclasses import dataclass

from dspark.engine.loop import EngineLoop
from dspark.engine.observer import RoundRecord
from dspark.scheduler.plan import PlannedSpan, StepPlan
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
