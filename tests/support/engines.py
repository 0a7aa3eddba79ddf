"""Engines over tiny models, and a plain way to run them."""

from collections.abc import Callable, Iterable
from typing import Any

from dspark.engine.core import Engine, Speculation
from dspark.engine.graphs import GraphPlan
from dspark.engine.loop import EngineLoop
from dspark.engine.request import Emission
from dspark.scheduler.plan import PlannedSpan, StepPlan
from dspark.scheduler.scheduler import Scheduler
from dspark.speculative.proposer import ContinuationProposer
from dspark.state.prefix_cache import PrefixCache
from support.tiny_models import BLOCK, MAX_LEN, NUM_VALID, LetterTokenizer, tiny_model, tiny_state


def tiny_engine(
    model_key: tuple[Any, ...], speculation: Speculation | None = None, graphs: GraphPlan | None = None, **state: Any
) -> Engine:
    """An engine that drafts with the model's own stages unless it is told otherwise."""
    model = tiny_model(*model_key)
    return Engine(model, tiny_state(model, **state), LetterTokenizer(), speculation or Speculation(BLOCK), graphs)


def given(tokens: dict[Any, list[int]], num_right: Callable[[Any, int], int] | int = BLOCK) -> Speculation:
    """Drafts are the given tokens; only the first `num_right` of a block are right."""
    count = num_right if callable(num_right) else lambda request_id, anchor: num_right
    return Speculation(BLOCK, proposer=ContinuationProposer(tokens, BLOCK, NUM_VALID, num_right=count))


def step(engine: Engine, request_ids: Iterable[Any], verify_len: int = BLOCK, num_padding: int = 0) -> list[Emission]:
    """One step that writes all known rows of some requests and verifies up to `verify_len` drafts."""
    spans = []
    for request_id in request_ids:
        needs = engine.needs(request_id)
        spans.append(PlannedSpan(request_id, needs.num_pending, min(needs.verify_len, verify_len)))
    emissions = engine.step(StepPlan(tuple(spans)), num_padding)
    engine.state.check_integrity()
    return emissions


def finish(engine: Engine, request_ids: Iterable[Any], verify_len: int = BLOCK) -> dict[Any, list[Emission]]:
    """Step until the given requests have ended; they keep their state."""
    emissions: dict[Any, list[Emission]] = {request_id: [] for request_id in request_ids}
    while running := [name for name in emissions if engine.requests[name].finish_reason is None]:
        for emission in step(engine, running, verify_len):
            emissions[emission.request_id].append(emission)
    return emissions


def tiny_loop(
    *model_key: Any,
    speculation: Speculation | None = None,
    num_slots: int = 4,
    num_pages: int = 64,
    max_rows: int = 64,
    page_tokens: int = 8,
    interval_pages: int = 2,
    image_bytes: int = 2**24,
    reuses_prefixes: bool = True,
    graphs: GraphPlan | None = None,
) -> EngineLoop:
    """A serving engine over a tiny model, with small pages and images every two of them."""
    engine = tiny_engine(
        model_key,
        speculation,
        graphs,
        num_slots=num_slots,
        num_pages=num_pages,
        page_tokens=page_tokens,
        max_rewind=page_tokens - 1 if reuses_prefixes else 1,
        max_ahead=BLOCK + 1,
    )
    return EngineLoop(
        engine,
        Scheduler(num_slots, max_rows, num_pages, engine.state.page_tokens),
        PrefixCache(engine.state, image_bytes),
        MAX_LEN,
        image_interval=interval_pages * engine.state.page_tokens,
        reuses_prefixes=reuses_prefixes,
    )


def run_out(loop: EngineLoop) -> dict[Any, list[Emission]]:
    """Step until nothing is left; all is checked after every step."""
    emissions: dict[Any, list[Emission]] = {}
    while loop.has_work:
        for emission in loop.step():
            emissions.setdefault(emission.request_id, []).append(emission)
        loop.check_integrity()
    return emissions
