"""Decode steps at real shapes: rounds with forced acceptance beside plain decoding, on the same random weights.

The engine is the one that ships, over a model that `dummy_weights` makes. Every request has a random prompt of the
same length; when all of them decode, steps are timed as they are, then again with stamps inside
(`decode_phases`), and a few more run eagerly to count the experts that their rows reach.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch

from dspark.bench.decode_memory import check_memory, request_pages
from dspark.bench.decode_phases import PhaseClock, Phases
from dspark.bench.decode_profile import StepProfile, profile_steps
from dspark.bench.decode_routes import RouteCounter
from dspark.bench.device_timing import copy_bandwidth
from dspark.bench.dummy_weights import dummy_model, without_draft
from dspark.bench.geometry import Geometry
from dspark.bench.random_text import RandomText
from dspark.bench.roofline import Load, Roofline
from dspark.config import Config, SpeculativeConfig
from dspark.config.environment import read_environment
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import build_loop
from dspark.engine.device import engine_facts, hardware_facts, place
from dspark.engine.device_memory import memory_of
from dspark.engine.loop import EngineLoop
from dspark.engine.machine import describe_machine
from dspark.engine.memory import MemoryPlan
from dspark.engine.sizing import EngineParts, size_engine
from dspark.engine.speculation import Speculation, plan_speculation
from dspark.engine.threads import use_threads_for
from dspark.models.build import Model
from dspark.models.facts import model_facts

SCHEMA = "dspark.bench.decode/1"
PLAIN, ROUNDS = "plain", "DSpark"
_WARM_STEPS = 6
_ROUTE_STEPS = 2
_PROFILE_STEPS = 8
_BATCHED_TOKENS = 2048
# Of a device that nobody else uses.
_MEMORY_SHARE = 0.95


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured.

    Attributes:
        requests: how many run at once, one figure each.
        context: tokens of each prompt.
        steps: timed steps of each figure; a third as many run again with stamps.
        accepted_len: forced mean accepted length of a round, the bonus counted; None measures the draft's own.
        with_draft: false decodes plainly only.
        temperature: of all requests.
        profile: also list the kernels of a step.
        eager: capture nothing.
        ranks: devices that share every layer.
    """

    requests: tuple[int, ...] = (1, 4, 16)
    context: int = 512
    steps: int = 48
    accepted_len: float | None = 3.51
    with_draft: bool = True
    temperature: float = 0.0
    profile: bool = False
    eager: bool = False
    ranks: int = 1

    @property
    def stamped_steps(self) -> int:
        """Steps with stamps inside."""
        return max(self.steps // 3, 2)

    def num_steps(self) -> int:
        """Steps of a figure after its prefill, at most."""
        return _WARM_STEPS + self.steps + self.stamped_steps + (1 + _PROFILE_STEPS if self.profile else 0)


@dataclass(frozen=True)
class DecodeFigure:
    """One way of decoding at one number of requests.

    Attributes:
        step_ms: median; low_ms and high_ms are the 10th and the 90th of a hundred.
        tokens: emitted tokens of a step, of all requests; a step is a round of each.
        phases: of the steps with stamps.
        experts: distinct experts a layer that the rows of (target, draft) reach; None where none were counted.
        floor_ms: least time of a step by the bytes of evenly routed rows, and counted_floor_ms by the experts that were
            counted; None without an accelerator.
        profile: kernels of a step, where they were asked for; a sentence where the profiler failed.
    """

    mode: str
    num_requests: int
    step_ms: float
    low_ms: float
    high_ms: float
    mean_ms: float
    tokens: float
    phases: Phases
    experts: tuple[float | None, float | None]
    floor_ms: float | None
    counted_floor_ms: float | None
    profile: StepProfile | str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, and so of the one device."""
        return 1e3 * self.tokens / self.mean_ms

    @property
    def ms_per_token(self) -> float:
        """Milliseconds between two tokens of a request."""
        return self.mean_ms * self.num_requests / self.tokens

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            **asdict(self),
            "accepted_len": self.tokens / self.num_requests,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_request": self.tokens_per_second / self.num_requests,
            "ms_per_token": self.ms_per_token,
            "roofline_share": self.floor_ms / self.step_ms if self.floor_ms else None,
        }


@dataclass(frozen=True)
class DecodeReport:
    """All figures of one geometry on one machine. copy_bandwidth: bytes a second, None without an accelerator."""

    geometry: str
    cuts: tuple[str, ...]
    machine: dict[str, Any]
    settings: DecodeSettings
    request_bytes: int
    memory: MemoryPlan
    copy_bandwidth: float | None
    figures: tuple[DecodeFigure, ...]

    def gain(self, figure: DecodeFigure) -> float | None:
        """Tokens a second over those of plain decoding with as many requests."""
        plain = next((f for f in self.figures if (f.mode, f.num_requests) == (PLAIN, figure.num_requests)), None)
        return figure.tokens_per_second / plain.tokens_per_second if plain else None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        values = {key: value for key, value in vars(self).items() if key not in ("settings", "figures")}
        figures = [{**figure.as_json(), "gain": self.gain(figure)} for figure in self.figures]
        return {
            "schema": SCHEMA,
            "weights": "random",
            **values,
            "memory": self.memory.as_json(),
            "settings": asdict(self.settings),
            "figures": figures,
        }


def run_decode_bench(
    geometry: Geometry, settings: DecodeSettings, on_figure: Callable[[DecodeFigure], None] = lambda figure: None
) -> DecodeReport:
    """Measure every number of requests, plainly and in rounds.

    Args:
        geometry: model shapes, cut already. on_figure: called with each figure when it is complete.
    Raises:
        DSparkError: the model does not fit, or the settings do not go together.
    """
    config = _config(geometry, settings, max(settings.requests), with_draft=settings.with_draft)
    use_threads_for(geometry.plan, read_environment())
    placement = place(config)
    need = check_memory(geometry, config, placement)
    bandwidth = copy_bandwidth(placement.device) if placement.device.type == "cuda" else None
    _release(placement.device)
    with torch.no_grad():
        model = dummy_model(geometry.plan, placement.ops, placement.dtype, placement.device)
        plain_model = without_draft(model)
    memory = _memory(geometry, model, config, placement.device)
    _release(placement.device)
    figures = []
    for mode, network in ((PLAIN, plain_model), (ROUNDS, model)):
        if mode == ROUNDS and not (settings.with_draft and model.draft is not None):
            continue
        for count in settings.requests:
            bench = _Bench(geometry, network, settings, mode, count, placement.device, bandwidth)
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


def _memory(geometry: Geometry, model: Model, config: Config, device: torch.device) -> MemoryPlan:
    """Who holds the memory with the most requests; measured, where it can be."""
    text, assumed = RandomText(geometry.plan.vocab_size), replace(config, max_num_pages=None)
    assert config.max_model_len is not None
    parts = EngineParts(model, text, assumed, _speculation(geometry, config), config.max_model_len, device)
    return size_engine(parts, memory_of(device, config))


def _speculation(geometry: Geometry, config: Config) -> Speculation:
    return replace(plan_speculation(config, model_facts(geometry.plan), {}), health=None)


@dataclass(frozen=True)
class _Bench:
    """One figure in the making."""

    geometry: Geometry
    model: Model
    settings: DecodeSettings
    mode: str
    count: int
    device: torch.device
    bandwidth: float | None

    def measure(self) -> DecodeFigure:
        """Prefill, warm up, time, stamp, profile, count routes."""
        settings = self.settings
        loop = self._started_loop(is_eager=settings.eager)
        for _ in range(_WARM_STEPS):
            loop.step()
        times, tokens = [], 0
        for _ in range(settings.steps):
            began = time.perf_counter()
            emissions = loop.step()
            times.append(1e3 * (time.perf_counter() - began))
            tokens += sum(len(emission.token_ids) for emission in emissions)
        clock = PhaseClock(loop.engine.stopwatch, self.device)
        with clock.attached(settings.stamped_steps):
            for _ in range(settings.stamped_steps):
                loop.step()
        found = self._profile(loop) if settings.profile else None
        loop.check_integrity()
        assert len(loop.engine.requests) == self.count, "requests ended while they were timed"
        del loop
        _release(self.device)
        experts = self._count_experts()
        ordered = sorted(times)
        floor, counted = self._floors(experts)
        return DecodeFigure(
            self.mode,
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
        )

    def _started_loop(self, *, is_eager: bool) -> EngineLoop:
        """A loop in which every request decodes, with a draft where there are drafts."""
        with_draft = self.mode == ROUNDS
        config = _config(self.geometry, self.settings, self.count, with_draft=with_draft, is_eager=is_eager)
        text = RandomText(self.geometry.plan.vocab_size)
        speculation = _speculation(self.geometry, config)
        assert config.max_model_len is not None
        loop = build_loop(self.model, text, config, speculation, config.max_model_len, self.device)
        most = config.max_model_len - self.settings.context
        generator = torch.Generator().manual_seed(1)
        for number in range(self.count):
            shape = (self.settings.context,)
            prompt = torch.randint(self.geometry.plan.vocab_size, shape, generator=generator).tolist()
            params = SamplingParams(
                max_tokens=most, ignore_eos=True, temperature=self.settings.temperature, seed=number
            )
            loop.add(f"request-{number}", prompt, params)
        while not all(request.origins for request in loop.engine.requests.values()):
            loop.step()
        return loop

    def _count_experts(self) -> tuple[float | None, float | None]:
        """Distinct experts of a few eager steps."""
        loop, counter = self._started_loop(is_eager=True), RouteCounter(self.model)
        with counter.attached():
            for _ in range(_ROUTE_STEPS):
                loop.step()
        target_rows, draft_rows = self._rows()
        return counter.mean("target", target_rows), counter.mean("draft", draft_rows)

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
        rooflines = (Roofline(self.geometry.plan), Roofline(self.geometry.plan, distinct=counted))
        first, second = (self._floor_ms(roofline, self.bandwidth) for roofline in rooflines)
        return first, second

    def _floor_ms(self, roofline: Roofline, bandwidth: float) -> float:
        target_rows, draft_rows = self._rows()
        context = self.settings.context
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
    geometry: Geometry, settings: DecodeSettings, count: int, *, with_draft: bool, is_eager: bool = False
) -> Config:
    """The configuration of one figure, admitted."""
    draft = geometry.plan.draft if with_draft else None
    speculative = None
    tokens_per_step = 1
    if draft is not None:
        speculative = SpeculativeConfig(spec_decode_acceptance_length=settings.accepted_len)
        tokens_per_step = 1 + draft.block_size if settings.accepted_len is None else ceil(settings.accepted_len)
    width = draft.block_size if draft else 0
    # Room for every step, for those in which other prompts are still computed, and for whole blocks in the last ones.
    num_steps = settings.num_steps() + count * (1 + -(-settings.context // (_BATCHED_TOKENS // 2)))
    max_len = settings.context + num_steps * tokens_per_step + 2 * (1 + width)
    if max_len > geometry.plan.max_positions:
        raise DSparkError(
            f"--context {settings.context} and {settings.steps} steps need {max_len} positions, and "
            f"{geometry.name} has {geometry.plan.max_positions}: lower one of them"
        )
    config = Config(
        tensor_parallel_size=settings.ranks,
        max_num_seqs=count,
        max_num_batched_tokens=max(_BATCHED_TOKENS, count * (1 + width)),
        max_model_len=max_len,
        max_num_pages=count * request_pages(geometry, max_len),
        enable_prefix_caching=False,
        enforce_eager=is_eager,
        gpu_memory_utilization=_MEMORY_SHARE,
        speculative_config=speculative,
    )
    config.validated(model_facts(geometry.plan), hardware=hardware_facts(), engine=engine_facts())
    return config


def _release(device: torch.device) -> None:
    """Give the memory of graphs and state back before the next figure is made."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
