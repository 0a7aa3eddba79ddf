"""Checks of engines: passes of fixed shape against passes op by op, in the tokens of whole requests."""

import random
from collections.abc import Iterator
from dataclasses import replace

from dspark.config import Config
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import Assembly, assemble, loop_over
from dspark.engine.graphs import GraphPlan
from dspark.engine.loop import EngineLoop
from dspark.engine.sizing import EngineParts
from dspark.validate.lifecycle.probe import ProbeResult

Tokens = dict[int, list[int]]
_LONGEST_PROMPT = 40


def fixed_loop(assembly: Assembly, graphs: GraphPlan) -> EngineLoop:
    """An engine like that of an assembly, with passes of fixed shape."""
    engine = assembly.loop.engine
    parts = EngineParts(
        engine.model,
        assembly.tokenizer,
        assembly.config,
        assembly.speculation,
        assembly.max_model_len,
        assembly.placement.device,
        assembly.share,
    )
    memory = assembly.loop.memory
    assert memory is not None
    return loop_over(parts.engine(memory.num_pages, graphs), assembly.config, assembly.max_model_len, memory)


def check_tokens(
    config: Config, name: str, graphs: GraphPlan, num_requests: int, num_tokens: int, seed: int
) -> Iterator[ProbeResult]:
    """Decode random prompts, half of them greedily and half at temperature 1.

    Args:
        config: of the eager engine; with a speculative_config both ways of decoding are compared.
        name: of the model. graphs: how the other engine launches its passes.
        num_requests, num_tokens: to decode. seed: of prompts and noise.
    """
    ways = [("plain", replace(config, speculative_config=None))]
    if config.speculative_config is not None:
        ways.append(("drafts", config))
    wanted: Tokens | None = None
    for way, settings in ways:
        assembly = assemble(config=settings)
        if wanted is None:
            wanted = _decoded(assembly.loop, num_requests, num_tokens, seed, "eager")
        loop = fixed_loop(assembly, graphs)
        # The second time every request meets others, in slots and pages that somebody has left.
        for company in ("first", "second"):
            found = _decoded(loop, num_requests, num_tokens, seed, company)
            total = sum(len(tokens) for tokens in wanted.values())
            wrong = sum(_differing(found[number], tokens) for number, tokens in wanted.items())
            message = f"{wrong} tokens differ" if wrong else "no token differs from plain decoding op by op"
            yield ProbeResult(f"{name}: tokens, {way}, {company} time", wrong == 0, total, message)


def _decoded(loop: EngineLoop, num_requests: int, num_tokens: int, seed: int, order: str) -> Tokens:
    """Tokens of each request; they are queued in an order of their own."""
    numbers = list(range(num_requests))
    random.Random(order).shuffle(numbers)
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")
        prompt = [rng.randrange(loop.engine.num_valid_tokens) for _ in range(rng.randint(1, _LONGEST_PROMPT))]
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=float(number % 2), seed=number)
        loop.add(number, prompt, params)
    found: Tokens = {number: [] for number in numbers}
    while loop.has_work:
        for emission in loop.step():
            found[int(str(emission.request_id))] += emission.token_ids
    loop.check_integrity()
    return found


def _differing(left: list[int], right: list[int]) -> int:
    return sum(a != b for a, b in zip(left, right, strict=False)) + abs(len(left) - len(right))
