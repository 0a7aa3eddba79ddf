"""Decode steps at real shapes: rounds with forced acceptance beside plain decoding, on the same random weights.

The engine is the one that ships, over a model that `dummy_weights` makes. Every request has a random prompt of the
same length, which is computed; when all of them decode, steps are timed as they are, then again with stamps inside
(`decode_phases`). A few steps run eagerly before, after shorter prompts, to count the experts that rows reach and to
see that logits are numbers.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, isfinite

import torch

from dspark.bench.decode_memory import check_memory, fit_engram, request_pages
from dspark.bench.decode_phases import EXTRA_STEPS, PhaseClock
from dspark.bench.decode_profile import StepProfile, profile_steps
from dspark.bench.decode_ranks import Collectives, ExchangeCounter, dummy_part, measure_collectives
from dspark.bench.decode_report import FAST, PLAIN, ROUNDS, DecodeFigure, DecodeReport, DecodeSettings
from dspark.bench.decode_routes import RouteCounter
from dspark.bench.device_timing import copy_bandwidth
from dspark.bench.dummy_weights import dummy_model, with_ops, without_draft
from dspark.bench.geometry import Geometry
from dspark.bench.random_text import RandomText
from dspark.bench.roofline import Load, Roofline
from dspark.config import Config, SpeculativeConfig
from dspark.config.environment import read_environment
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import build_loop
from dspark.engine.device import Placement, engine_facts, hardware_facts, place
from dspark.engine.device_memory import memory_of
from dspark.engine.loop import EngineLoop
from dspark.engine.machine import describe_machine
from dspark.engine.memory import MemoryPlan
from dspark.engine.ranks.opening import open_team
from dspark.engine.ranks.share import Share
from dspark.engine.request import Emission
from dspark.engine.sizing import EngineParts, size_engine
from dspark.engine.speculation import Speculation, plan_speculation
from dspark.engine.threads import use_threads_for
from dspark.models.build import Model
from dspark.models.facts import model_facts
from dspark.ops.library import with_library_products
from dspark.ops.table import TablePlace

_WARM_STEPS = 6
_ROUTE_STEPS = 2
_PROFILE_STEPS = 8
_BATCHED_TOKENS = 2048
# Of a device that nobody else uses.
_MEMORY_SHARE = 0.95
# A measurement would rather wait for a rank than end.
_RANK_TIMEOUT_S = 60.0
# Routes hang on the last tokens, not on how many there were before.
_ROUTE_CONTEXT = 512


def with_fitting_tables(geometry: Geometry, settings: DecodeSettings) -> Geometry:
    """A geometry with Engram tables as large as memory holds beside what the settings ask for.

    Raises:
        DSparkError: the settings do not go together, or there is no room for tables.
    """
    config = _config(geometry, settings, max(settings.requests), max(settings.contexts), with_draft=settings.with_draft)
    return fit_engram(geometry, config, place(config))


def run_decode_bench(
    geometry: Geometry, settings: DecodeSettings, on_figure: Callable[[DecodeFigure], None] = lambda figure: None
) -> DecodeReport:
    """Measure every context and number of requests, plainly and in rounds, with each kind of products.

    Args:
        geometry: model shapes, cut already. on_figure: called with each figure when it is complete.
    Raises:
        DSparkError: the model does not fit, or the settings do not go together.
    """
    config = _config(geometry, settings, max(settings.requests), max(settings.contexts), with_draft=settings.with_draft)
    use_threads_for(geometry.plan, read_environment())
    placement = place(config)
    need = check_memory(geometry, config, placement)
    bandwidth = copy_bandwidth(placement.device) if placement.device.type == "cuda" else None
    _release(placement.device)
    model = _weights(geometry, config, placement)
    memory = _memory(geometry, model, config, placement.device)
    _release(placement.device)
    figures = []
    for context, exactness, mode in product(settings.contexts, settings.exactness, (PLAIN, ROUNDS)):
        if mode == ROUNDS and (geometry.plan.draft is None or not settings.with_draft):
            continue
        network = _network(model, mode, exactness)
        for count in settings.requests:
            bench = _Bench(geometry, network, settings, mode, exactness, context, count, placement.device, bandwidth)
            figures.append(bench.measure())
            on_figure(figures[-1])
            _release(placement.device)
    return DecodeReport(
        geometry.name,
        geometry.cuts,
        describe_machine(placement.device),
        settings,
        need.request,
        memory,
        bandwidth,
        tuple(figures),
    )


def _weights(geometry: Geometry, config: Config, placement: Placement) -> Model | Share[Model]:
    """Random weights, on all ranks where there are several."""
    root = open_team(config, placement.device)
    if root is not None:
        return root.derive(dummy_part, geometry.plan, config)
    tables = TablePlace(config.engram_tables)
    with torch.no_grad():
        return dummy_model(geometry.plan, placement.ops, placement.dtype, placement.device, engram_tables=tables)


def _network(model: Model | Share[Model], mode: str, exactness: str) -> Model | Share[Model]:
    """The weights of one figure."""
    if isinstance(model, Share):
        return model.derive(_variant, mode, exactness)
    return _variant(model, mode, exactness)


def _own(model: Model | Share[Model]) -> tuple[Model, Share[Model] | None]:
    """The model of this process, and the share that it belongs to."""
    return (model.own, model) if isinstance(model, Share) else (model, None)


def _variant(model: Model, mode: str, exactness: str) -> Model:
    """The same weights under other ops, or for plain decoding: a model that captures nothing for a draft."""
    if exactness == FAST:
        model = with_ops(model, with_library_products(model.target.ops))
    return without_draft(model) if mode == PLAIN else model


def _memory(geometry: Geometry, model: Model | Share[Model], config: Config, device: torch.device) -> MemoryPlan:
    """Who holds the memory with the most requests; measured, where it can be."""
    text, assumed = RandomText(geometry.plan.vocab_size), replace(config, max_num_pages=None)
    assert config.max_model_len is not None
    own, share = _own(model)
    parts = EngineParts(own, text, assumed, _speculation(geometry, config), config.max_model_len, device, share)
    return size_engine(parts, memory_of(device, config))


def _speculation(geometry: Geometry, config: Config) -> Speculation:
    return replace(plan_speculation(config, model_facts(geometry.plan), {}), health=None)


@dataclass(frozen=True)
class _Bench:
    """One figure in the making."""

    geometry: Geometry
    network: Model | Share[Model]
    settings: DecodeSettings
    mode: str
    exactness: str
    context: int
    count: int
    device: torch.device
    bandwidth: float | None

    def measure(self) -> DecodeFigure:
        """Count routes, prefill, warm up, time, stamp, profile."""
        settings = self.settings
        experts, collectives = self._count()
        loop = self._started_loop(self.context, is_eager=settings.eager)
        for _ in range(_WARM_STEPS):
            loop.step()
        times, tokens = [], 0
        for _ in range(settings.steps):
            began = time.perf_counter()
            emissions = loop.step()
            times.append(1e3 * (time.perf_counter() - began))
            tokens += sum(len(emission.token_ids) for emission in emissions)
        clock = PhaseClock(loop.engine.stopwatch, self.device)
        clock.measure(loop.step, settings.stamped_steps)
        found = self._profile(loop) if settings.profile else None
        loop.check_integrity()
        assert len(loop.engine.requests) == self.count, "requests ended while they were timed"
        ordered = sorted(times)
        floor, counted = self._floors(experts)
        return DecodeFigure(
            self.mode,
            self.exactness,
            self.context,
            self.count,
            ordered[len(ordered) // 2],
            ordered[len(ordered) // 10],
            ordered[-1 - len(ordered) // 10],
            sum(times) / len(times),
            tokens / len(times),
            clock.phases(),
            experts,
            floor,
            counted,
            found,
            collectives,
        )

    def _started_loop(self, context: int, *, is_eager: bool, logprobs: int | None = None) -> EngineLoop:
        """A loop in which every request decodes, with a draft where there are drafts."""
        with_draft = self.mode == ROUNDS
        config = _config(self.geometry, self.settings, self.count, context, with_draft=with_draft, is_eager=is_eager)
        text = RandomText(self.geometry.plan.vocab_size)
        speculation = _speculation(self.geometry, config)
        assert config.max_model_len is not None
        model, share = _own(self.network)
        loop = build_loop(model, text, config, speculation, config.max_model_len, self.device, share=share)
        most = config.max_model_len - context
        generator = torch.Generator().manual_seed(1)
        for number in range(self.count):
            prompt = torch.randint(self.geometry.plan.vocab_size, (context,), generator=generator).tolist()
            params = SamplingParams(
                max_tokens=most,
                ignore_eos=True,
                temperature=self.settings.temperature,
                seed=number,
                logprobs=logprobs,
            )
            loop.add(f"request-{number}", prompt, params)
        while not all(request.origins for request in loop.engine.requests.values()):
            loop.step()
        return loop

    def _count(self) -> tuple[tuple[float | None, float | None], Collectives | None]:
        """Distinct experts, and exchanges of ranks, of a few eager steps, whose logits must be numbers."""
        loop = self._started_loop(min(self.context, _ROUTE_CONTEXT), is_eager=True, logprobs=0)
        model, share = _own(self.network)
        routes, exchanges = RouteCounter(model), ExchangeCounter(model.target.ranks)
        with routes.attached(), exchanges.attached():
            for _ in range(_ROUTE_STEPS):
                _require_numbers(loop.step())
        del loop
        _release(self.device)
        target_rows, draft_rows = self._rows()
        experts = routes.mean("target", target_rows), routes.mean("draft", draft_rows)
        return experts, measure_collectives(share, exchanges.seen, _ROUTE_STEPS) if share else None

    def _rows(self) -> tuple[int, int]:
        """Rows of a target pass and of a draft pass."""
        draft = self.geometry.plan.draft
        block = draft.block_size if draft is not None and self.mode == ROUNDS else 0
        return self.count * (1 + block), self.count * block

    def _floors(self, experts: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
        """Least times of a step: by evenly routed rows, and by the experts that were counted."""
        if self.bandwidth is None:
            return None, None
        target_rows, draft_rows = self._rows()
        keys = (("target", target_rows), ("draft", draft_rows))
        counted = {key: count for key, count in zip(keys, experts, strict=True) if count is not None}
        plan, ranks = self.geometry.plan, self.settings.ranks
        rooflines = (Roofline(plan, ranks), Roofline(plan, ranks, distinct=counted))
        first, second = (self._floor_ms(roofline, self.bandwidth) for roofline in rooflines)
        return first, second

    def _floor_ms(self, roofline: Roofline, bandwidth: float) -> float:
        target_rows, draft_rows = self._rows()
        context = self.context
        floor = roofline.target(Load(self.count, target_rows // self.count, context)).ms(bandwidth)
        if draft_rows:
            floor += roofline.draft(Load(self.count, draft_rows // self.count, context)).ms(bandwidth)
        return floor

    def _profile(self, loop: EngineLoop) -> StepProfile | str:
        if self.device.type != "cuda":
            return "kernels are listed on an accelerator only"
        try:
            return profile_steps(partial(loop.step), _PROFILE_STEPS)
        except (RuntimeError, AttributeError) as error:
            # The figures are worth more than the list of kernels beside them.
            return f"the profiler failed: {error}"


def _config(
    geometry: Geometry,
    settings: DecodeSettings,
    count: int,
    context: int,
    *,
    with_draft: bool,
    is_eager: bool = False,
) -> Config:
    """The configuration of one figure, admitted."""
    draft = geometry.plan.draft if with_draft else None
    speculative = None
    tokens_per_step = 1
    if draft is not None:
        speculative = SpeculativeConfig(spec_decode_acceptance_length=settings.accepted_len)
        tokens_per_step = 1 + draft.block_size
        if settings.accepted_len is not None:
            tokens_per_step = min(ceil(settings.accepted_len), tokens_per_step)
    width = draft.block_size if draft else 0
    # Room for every step, for those in which other prompts are still computed, and for whole blocks in the last ones.
    timed = settings.steps + EXTRA_STEPS + settings.stamped_steps + (1 + _PROFILE_STEPS if settings.profile else 0)
    num_steps = _WARM_STEPS + timed + count * (1 + -(-context // (_BATCHED_TOKENS // 2)))
    max_len = context + num_steps * tokens_per_step + 2 * (1 + width)
    if max_len > geometry.plan.max_positions:
        raise DSparkError(
            f"--context {context} and {settings.steps} steps need {max_len} positions, and "
            f"{geometry.name} has {geometry.plan.max_positions}: lower one of them"
        )
    config = Config(
        tensor_parallel_size=settings.ranks,
        rank_timeout_s=_RANK_TIMEOUT_S,
        max_num_seqs=count,
        max_num_batched_tokens=max(_BATCHED_TOKENS, count * (1 + width)),
        max_model_len=max_len,
        max_num_pages=count * request_pages(geometry, max_len),
        enable_prefix_caching=False,
        enforce_eager=is_eager,
        engram_tables=settings.engram_tables,
        gpu_memory_utilization=_MEMORY_SHARE,
        speculative_config=speculative,
    )
    config.validated(model_facts(geometry.plan), hardware=hardware_facts(), engine=engine_facts())
    return config


def _require_numbers(emissions: list[Emission]) -> None:
    """Refuse weights that overflow: a token's log-probability is a number only where its whole row of logits is."""
    if not all(isfinite(one.token) for emission in emissions for one in emission.logprobs):
        raise DSparkError("the random weights give logits that are no numbers: times of such passes mean nothing")


def _release(device: torch.device) -> None:
    """Give the memory of graphs and state back before the next figure is made."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
