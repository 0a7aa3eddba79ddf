"""From a configuration to a running engine: admission, weights, tokenizer, state, scheduler, loop."""

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from dspark.config import Admission, Config
from dspark.config.environment import read_environment
from dspark.config.errors import CheckpointError, ConfigError
from dspark.engine.core import Engine, Speculation
from dspark.engine.device import Placement, place
from dspark.engine.device_memory import DeviceMemory, memory_of
from dspark.engine.graphs import GraphPlan
from dspark.engine.identity import engine_identity
from dspark.engine.loop import EngineLoop
from dspark.engine.memory import MemoryPlan, require_weights_fit
from dspark.engine.opening import open_checkpoint
from dspark.engine.ranks.engine import RankedEngine, RankedLoop
from dspark.engine.ranks.opening import CheckpointPlan, TeamMemory, open_on_ranks, open_team, read_checkpoint
from dspark.engine.ranks.share import Share
from dspark.engine.sizing import EngineParts, rank_weights, size_engine
from dspark.engine.speculation import default_speculation, plan_speculation
from dspark.engine.threads import use_threads_for
from dspark.engine.tokenizer import TextTokenizer, generation_eos_ids
from dspark.layers.plans import ModelPlan
from dspark.models.build import Model
from dspark.parallel.group import ALONE
from dspark.scheduler.scheduler import Scheduler
from dspark.state.prefix_cache import PrefixCache

_DEFAULT_INTERVAL_PAGES = 4

log = logging.getLogger("dspark.engine")


@dataclass(frozen=True)
class Outline:
    """What is known of an engine before its weights are read: all that its callers show and check.

    Attributes:
        config, plan: as they run.
        folder, draft_folder: of the checkpoint, and of the drafter where that is another one.
        tokenizer: of the checkpoint.
        admission: notes and remarks on the configuration.
        speculation: how it speculates.
        max_model_len: tokens of a request at most.
        placement: where it runs.
        num_threads: CPU threads of one operation.
    """

    config: Config
    plan: ModelPlan
    folder: Path
    draft_folder: Path | None
    tokenizer: TextTokenizer
    admission: Admission
    speculation: Speculation
    max_model_len: int
    placement: Placement
    num_threads: int

    @property
    def device(self) -> str:
        """The kind of device, and its number where there are several."""
        return str(self.placement.device)


@dataclass(frozen=True)
class Assembly(Outline):
    """An engine that is ready to run.

    Attributes:
        loop: the engine.
        share: the model on all ranks, where there are several.
    """

    loop: EngineLoop
    share: Share[Model] | None = None

    @property
    def speculation_status(self) -> str:
        """ "running", or "not running because ..."; it may change while the engine runs."""
        return self.loop.engine.speculation_status


def outline(
    model: str | Path | None = None, *, config: Config | None = None, draft: str = "dspark", **overrides: Any
) -> Outline:
    """Admit a configuration and read all but the weights. Arguments and errors as for `assemble`."""
    is_default = config is None and "speculative_config" not in overrides
    opening = open_checkpoint(_merged_config(model, config, draft, overrides), is_draft_optional=is_default)
    settings = opening.config
    placement = place(settings)
    identity = engine_identity(settings, opening.plan, opening.folder, placement.ops, placement.device)
    speculation = plan_speculation(settings, opening.facts, identity)
    eos = dict.fromkeys((*opening.plan.eos_token_ids, *generation_eos_ids(opening.folder)))
    return Outline(
        config=settings,
        plan=replace(opening.plan, eos_token_ids=tuple(eos)),
        folder=opening.folder,
        draft_folder=opening.draft_folder,
        tokenizer=_tokenizer_for(opening.plan, opening.folder),
        admission=opening.admission,
        speculation=speculation,
        max_model_len=settings.context_len(opening.facts),
        placement=placement,
        num_threads=use_threads_for(opening.plan, read_environment()),
    )


def assemble(
    model: str | Path | None = None, *, config: Config | None = None, draft: str = "dspark", **overrides: Any
) -> Assembly:
    """Build an engine.

    Args:
        model: folder of a checkpoint; None is the embedded model.
        config: all settings; `model` and `overrides` replace its fields.
        draft: "dspark" or "off", read only without a `config` and without a speculative_config in `overrides`;
            "dspark" then verifies drafts by `default_speculation`, and decodes plainly where there is no drafter.
        overrides: fields of `Config`.
    Raises:
        ConfigError, CheckpointError: with what to change.
    """
    sketch = outline(model, config=config, draft=draft, **overrides)
    loaded, share, memory = _load(sketch)
    loaded.plan = replace(loaded.plan, eos_token_ids=sketch.plan.eos_token_ids)
    loop = build_loop(
        loaded,
        sketch.tokenizer,
        sketch.config,
        sketch.speculation,
        sketch.max_model_len,
        sketch.placement.device,
        memory,
        share=share,
    )
    return Assembly(**{**vars(sketch), "plan": loaded.plan, "loop": loop, "share": share})


def _load(sketch: Outline) -> tuple[Model, Share[Model] | None, DeviceMemory]:
    """The weights, on all ranks where there are several, and the memory that they are in."""
    config, placement = sketch.config, sketch.placement
    memory: DeviceMemory = memory_of(placement.device, config)
    kept = sketch.plan if config.speculative_config is not None else replace(sketch.plan, draft=None)
    needed = rank_weights(kept, config, placement.ops)
    root = open_team(config, placement.device)
    if root is not None:
        memory = TeamMemory(memory, root, config)
    require_weights_fit(memory.room(), needed)
    plan = CheckpointPlan(sketch.folder, sketch.draft_folder, config)
    if root is None:
        return read_checkpoint(plan, placement.device, ALONE), None, memory
    share = open_on_ranks(root, plan)
    return share.own, share, memory


def build_loop(
    model: Model,
    tokenizer: TextTokenizer,
    config: Config,
    speculation: Speculation,
    max_model_len: int,
    device: torch.device,
    memory: DeviceMemory | None = None,
    shapes: GraphPlan | None = None,
    share: Share[Model] | None = None,
) -> EngineLoop:
    """State, scheduler, cache and loop over a loaded model, sized to the memory that is left.

    Args:
        memory: of the device; found out without it.
        shapes: of passes, in place of what the configuration captures.
        share: of the model, where several ranks hold it.

    Raises:
        ConfigError: no request of full length fits; the message says what would.
    """
    parts = EngineParts(model, tokenizer, config, speculation, max_model_len, device, share)
    memory_plan = size_engine(parts, memory or memory_of(device, config))
    log.info("memory: %s", memory_plan.sentence())
    return loop_over(parts.engine(memory_plan.num_pages, shapes), config, max_model_len, memory_plan)


def loop_over(engine: Engine, config: Config, max_model_len: int, memory: MemoryPlan) -> EngineLoop:
    """Scheduler, prefix cache and loop around an engine."""
    interval = config.prefix_cache_interval or _DEFAULT_INTERVAL_PAGES * memory.page_tokens
    loop_kind = RankedLoop if isinstance(engine, RankedEngine) else EngineLoop
    return loop_kind(
        engine,
        Scheduler(config.max_num_seqs, config.max_num_batched_tokens, memory.num_pages, memory.page_tokens),
        PrefixCache(engine.state, memory.images),
        max_model_len,
        image_interval=-(-interval // memory.page_tokens) * memory.page_tokens,
        reuses_prefixes=config.enable_prefix_caching,
        memory=memory,
    )


def _tokenizer_for(plan: ModelPlan, folder: Path) -> TextTokenizer:
    """The folder's tokenizer; it may have fewer tokens than the model has rows, and not more."""
    tokenizer = TextTokenizer(folder)
    if tokenizer.vocab_size > plan.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens and the model only {plan.vocab_size} rows: "
            "use the tokenizer.json that ships with this model"
        )
    return tokenizer


def _merged_config(model: str | Path | None, config: Config | None, draft: str, overrides: dict[str, Any]) -> Config:
    if draft not in ("dspark", "off"):
        raise ConfigError(f'draft must be "dspark" or "off", not {draft!r}')
    known = {field.name for field in fields(Config)}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{name!r} is no setting of the engine; known are {', '.join(sorted(known))}")
    if config is None:
        config = Config(speculative_config=default_speculation() if draft == "dspark" else None)
    if model is not None:
        overrides = {"model": str(model), **overrides}
    return replace(config, **overrides)
