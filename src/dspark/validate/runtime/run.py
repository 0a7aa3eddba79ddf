"""One run of the runtime validator over a model and two tiny ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dspark.config import CompilationConfig, Config, CUDAGraphMode, SpeculativeConfig
from dspark.config.errors import ConfigError
from dspark.engine.assembly import assemble
from dspark.engine.graphs import GraphPlan
from dspark.engine.machine import describe_machine
from dspark.engine.ranks.part import PartPlan
from dspark.engine.sizing import EngineParts
from dspark.models.build import Model
from dspark.state.model_state import ModelState
from dspark.validate.lifecycle.probe import ProbeResult
from dspark.validate.runtime.passes import check_passes
from dspark.validate.runtime.scene import Part, make_parts
from dspark.validate.runtime.tokens import check_tokens

SCHEMA = "dspark.validate.runtime/1"
_MAX_LEN = 512
_MAX_NUM_SEQS = 8
# Rows of the pieces that prompts are launched in.
_PIECES = (64, 160)


@dataclass(frozen=True)
class RuntimeSettings:
    """What is checked.

    Attributes:
        with_graphs: passes of fixed shape, launched as graphs where the device captures them; else ragged passes.
        num_parts: requests whose rows are compared. num_requests, num_tokens: whose tokens are compared.
        seed: of everything random.
        num_ranks: that share every model.
    """

    with_graphs: bool
    num_parts: int = 9
    num_requests: int = 12
    num_tokens: int = 24
    seed: int = 0
    num_ranks: int = 1


@dataclass
class RuntimeReport:
    """What was found. `launches` says how passes were launched."""

    settings: RuntimeSettings
    launches: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    probes: list[ProbeResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether nothing was found, and something looked at."""
        return bool(self.probes) and all(probe.is_ok for probe in self.probes)

    def as_json(self) -> dict[str, Any]:
        """Plain data for programs."""
        return {
            "schema": SCHEMA,
            "is_ok": self.is_ok,
            **vars(self),
            "settings": vars(self.settings),
            "probes": [probe.as_json() for probe in self.probes],
        }


def validate_runtime(
    models: list[tuple[str, Path | None]],
    settings: RuntimeSettings,
    on_probe: Callable[[ProbeResult], None] = lambda probe: None,
) -> RuntimeReport:
    """Check every model.

    Args:
        models: names and folders; None is the embedded model.
        on_probe: called with each result when it is there.

    Raises:
        DSparkError: a model cannot be run.
    """
    report = RuntimeReport(settings)
    for name, folder in models:
        for probe in _check(name, folder, settings, report):
            report.probes.append(probe)
            on_probe(probe)
    return report


def _check(name: str, folder: Path | None, settings: RuntimeSettings, report: RuntimeReport) -> Iterator[ProbeResult]:
    config = _eager_config(folder, settings.num_ranks)
    try:
        assembly = assemble(config=config)
    except ConfigError:
        config = replace(config, speculative_config=None)  # a checkpoint without draft stages
        assembly = assemble(config=config)
    device = assembly.placement.device
    engine = assembly.loop.engine
    block_size = assembly.speculation.num_speculative_tokens
    most = max(settings.num_parts, _MAX_NUM_SEQS) * (1 + block_size)
    is_captured = device.type == "cuda"
    graphs = GraphPlan((most,), assembly.max_model_len, is_captured=is_captured, piece_counts=_PIECES)
    report.machine = report.machine or describe_machine(device)
    report.launches = _launches(settings, device)
    parts = make_parts(
        settings.num_parts, engine.num_valid_tokens, 1 + block_size, assembly.max_model_len, settings.seed
    )
    rooms = replace(config, max_num_seqs=3 * settings.num_parts, max_num_batched_tokens=4096)
    fresh = EngineParts(engine.model, assembly.tokenizer, rooms, assembly.speculation, assembly.max_model_len, device)
    pages = 3 * settings.num_parts * -(-assembly.max_model_len // engine.state.page_tokens)
    arguments = fresh.part(pages, None), parts, graphs if settings.with_graphs else None, block_size, name
    if assembly.share is None:
        yield from _check_part(engine.model, *arguments)
    else:
        yield from map(_of_all_ranks, zip(*assembly.share.ask(_found_on_part, *arguments), strict=True))
    if settings.with_graphs:
        yield from check_tokens(config, name, graphs, settings.num_requests, settings.num_tokens, settings.seed)


def _check_part(
    model: Model, stores: PartPlan, parts: Sequence[Part], graphs: GraphPlan | None, block_size: int, name: str
) -> Iterator[ProbeResult]:
    """The checks of passes, over what one rank holds of the model."""
    device = model.target.embed.weight.device
    with torch.inference_mode():
        yield from check_passes(model, lambda: stores.state(model, ModelState, device), parts, graphs, block_size, name)


def _found_on_part(model: Model, *arguments: Any) -> list[ProbeResult]:
    """The same, as something that every rank runs at the same time: all play the same requests."""
    return list(_check_part(model, *arguments))


def _of_all_ranks(found: tuple[ProbeResult, ...]) -> ProbeResult:
    """One check, made on every rank over its own rows."""
    num_compared = sum(one.num_compared for one in found)
    for rank, one in enumerate(found):
        if not one.is_ok:
            return replace(one, num_compared=num_compared, message=f"rank {rank}: {one.message}")
    return replace(found[0], num_compared=num_compared)


def _eager_config(folder: Path | None, num_ranks: int) -> Config:
    """Op by op, whatever the device could capture."""
    return Config(
        model=str(folder) if folder else None,
        tensor_parallel_size=num_ranks,
        max_num_seqs=_MAX_NUM_SEQS,
        max_model_len=_MAX_LEN,
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE),
        speculative_config=SpeculativeConfig(),
    )


def _launches(settings: RuntimeSettings, device: torch.device) -> str:
    ranks = f" on {settings.num_ranks} ranks" if settings.num_ranks > 1 else ""
    if not settings.with_graphs:
        return f"ragged passes{ranks}, op by op"
    if device.type == "cuda":
        return f"passes of fixed shape{ranks}, launched as graphs"
    return f"passes of fixed shape{ranks}, op by op: this device captures no graphs"
