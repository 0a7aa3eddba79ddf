"""The doctor: reads only metadata of a model and says what would run, what is refused, and what memory it takes."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dspark.checkpoint.folder import CONFIG_NAME, INDEX_NAME, SafetensorsFolder, release_fingerprint
from dspark.checkpoint.load import Match, match_tensors
from dspark.checkpoint.plan import SkippedTensor, TensorPlan
from dspark.config import Admission, Config, EngineFacts, HardwareFacts, ModelFacts, admit
from dspark.config.errors import CheckpointError, ConfigError
from dspark.engine.device import hardware_facts, place
from dspark.engine.device_memory import memory_of
from dspark.engine.memory import MemoryPlan
from dspark.engine.sizing import foreseen, rank_weights
from dspark.layers.plans import ModelPlan
from dspark.models.engram_vocabulary import read_token_map
from dspark.models.facts import has_vision, model_facts
from dspark.models.inventory import DRAFT_PREFIX, expected_tensors, skip_rules
from dspark.models.registry import parse_config
from dspark.validate.memory import StateBytes, WeightBytes, float32_bytes, state_bytes, weight_table

NOT_CHECKED = "config only: weights not checked"
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True)
class SkippedGroup:
    """Tensors that are left out for one reason."""

    reason: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class TensorAccount:
    """Where every tensor of the checkpoint goes. `num_found` and `found_bytes` are None where there are no shards."""

    status: str
    num_expected: int
    expected_bytes: int
    num_found: int | None
    found_bytes: int | None
    skipped: tuple[SkippedGroup, ...]
    remarks: tuple[str, ...]
    fault: str | None


@dataclass(frozen=True)
class Vocabulary:
    """Rows of embedding and head against the tokenizer's ids; padded rows have no token and are never drawn."""

    num_rows: int
    num_tokens: int | None
    fault: str | None = None

    @property
    def num_padded(self) -> int | None:
        return None if self.num_tokens is None else self.num_rows - self.num_tokens


@dataclass(frozen=True)
class DraftCost:
    """What speculation adds: weights once, rings for each request."""

    weight_bytes: int
    window_bytes: int
    slack_bytes: int
    share_of_target: float


@dataclass(frozen=True)
class DoctorReport:
    """A dry run of one model under one configuration."""

    model: str
    family: str
    speculation: str
    num_layers: int
    num_draft_stages: int
    context_len: int
    vocabulary: Vocabulary
    admission: Admission
    tensors: TensorAccount
    weights: tuple[WeightBytes, ...]
    float32_bytes: int
    state: StateBytes
    draft: DraftCost | None
    num_requests: int
    requests_bytes: int
    memory: MemoryPlan | None
    memory_fault: str | None

    @property
    def is_healthy(self) -> bool:
        """True when the model would run, given the memory."""
        return not self.refusals

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why it would not run: the rules of admission, then the checkpoint itself."""
        return self.admission.refusals + tuple(fault for fault in (self.tensors.fault, self.vocabulary.fault) if fault)

    def as_json(self) -> dict[str, Any]:
        """Plain data for programs."""
        totals = {
            "would_run": self.is_healthy,
            "weight_bytes": sum(row.num_bytes for row in self.weights),
            "request_bytes": self.state.request_bytes,
            "bytes_per_token": self.state.bytes_per_token,
            "num_padded_tokens": self.vocabulary.num_padded,
            "memory": self.memory.as_json() if self.memory else None,
        }
        return asdict(self) | totals


def examine(
    model: Path,
    config: Config,
    *,
    hardware: HardwareFacts | None = None,
    engine: EngineFacts | None = None,
    name: str = "",
    is_draft_optional: bool = False,
) -> DoctorReport:
    """Dry run of a checkpoint folder, or of a config.json alone.

    Args:
        model: folder in the official layout, or the path of a config.json. A folder without shards is examined by
            its config.json only.
        config: what would be run. A speculative_config without a width takes the trained block size.
        hardware: the devices; None skips the rules that need to know them.
        engine: what would run it, which also decides how state is stored; None takes the settings at their word.
        name: what the report calls the model.
        is_draft_optional: run plainly, and say so, where the model has no draft stages and no width is asked for.

    Raises:
        DSparkError: there is no config.json, or it describes no known model. Broken or mismatched shards do not raise:
            they are the report's `tensors.fault`.
    """
    file = model / CONFIG_NAME if model.is_dir() else model
    settings = _read_settings(file)
    plan = parse_config(settings)
    if is_draft_optional and plan.draft is None and not _asks_for_width(config):
        config = replace(config, speculative_config=None)
    folder = file.parent if model.is_dir() else None
    facts = model_facts(
        plan,
        fingerprint=release_fingerprint(folder) if folder else "",
        has_vision=has_vision(settings),
    )
    has_draft = config.speculative_config is not None and plan.draft is not None
    expected = expected_tensors(plan, with_draft=has_draft)
    state = _state(plan, config, facts, engine)
    admission = admit(config, facts, hardware=hardware, engine=engine)
    memory, memory_fault = _memory(plan, config, facts, has_draft, engine) if admission.is_admitted else (None, None)
    return DoctorReport(
        model=name or str(model),
        family=plan.family,
        speculation=_speculation(config, facts, hardware, engine),
        num_layers=len(plan.layers),
        num_draft_stages=len(plan.draft.stages) if plan.draft else 0,
        context_len=config.context_len(facts),
        vocabulary=_vocabulary(folder, plan),
        admission=admission,
        tensors=_account(folder, plan, expected, has_draft),
        weights=weight_table(expected),
        float32_bytes=float32_bytes(expected),
        state=state,
        draft=_draft_cost(expected, state) if has_draft else None,
        num_requests=config.max_num_seqs,
        requests_bytes=config.max_num_seqs * (state.request_bytes + state.paged_bytes(config.context_len(facts))),
        memory=memory,
        memory_fault=memory_fault,
    )


def _read_settings(file: Path) -> dict[str, Any]:
    """A config.json as a mapping.

    Raises:
        CheckpointError: no such file, or it is not a JSON object.
    """
    try:
        parsed = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}): give a folder with a config.json, or that file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not JSON ({error}): give a folder with a config.json, or that file"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file} is not a JSON object: fetch it again")
    return parsed


def _vocabulary(folder: Path | None, plan: ModelPlan) -> Vocabulary:
    """Compare the tokenizer with the model; where there are weights there must be one."""
    num_tokens = _num_tokens(folder)
    vocabulary = Vocabulary(plan.vocab_size, num_tokens)
    if folder is None or (num_tokens is None and not has_weights(folder)):
        return vocabulary
    if num_tokens is None:
        return replace(vocabulary, fault=f"{folder} has no {TOKENIZER_NAME}: add the file of the model's release")
    if num_tokens > plan.vocab_size:
        fault = (
            f"the tokenizer has {num_tokens} tokens and the model only {plan.vocab_size} rows: use the "
            f"{TOKENIZER_NAME} that ships with this model"
        )
        return replace(vocabulary, fault=fault)
    if plan.ngrams is not None:
        try:
            read_token_map(folder, plan)
        except CheckpointError as error:
            return replace(vocabulary, fault=str(error))
    return vocabulary


def _num_tokens(folder: Path | None) -> int | None:
    """Ids that a folder's tokenizer can produce, counted as its largest id plus one; None without a tokenizer."""
    file = folder / TOKENIZER_NAME if folder else None
    if file is None or not file.is_file():
        return None
    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception for a file that it cannot read
        raise CheckpointError(f"{file} is not a tokenizer ({error}): fetch it again") from error
    return max(vocabulary.values(), default=-1) + 1


def _asks_for_width(config: Config) -> bool:
    return config.speculative_config is not None and config.speculative_config.num_speculative_tokens is not None


def _state(plan: ModelPlan, config: Config, facts: ModelFacts, engine: EngineFacts | None) -> StateBytes:
    width = config.draft_width(facts) if plan.draft else 0
    index_dtype = config.index_cache_dtype if engine is None else engine.index_cache_dtype
    reuses_prefixes = config.enable_prefix_caching
    return state_bytes(plan, width, config.kv_cache_dtype, index_dtype, reuses_prefixes=reuses_prefixes)


def _memory(
    plan: ModelPlan, config: Config, facts: ModelFacts, has_draft: bool, engine: EngineFacts | None
) -> tuple[MemoryPlan | None, str | None]:
    """What fits on this machine, or why it does not run here."""
    kept = plan if has_draft else replace(plan, draft=None)
    refusals = admit(config, facts, hardware=hardware_facts(), engine=engine).refusals
    if refusals:
        return None, refusals[0]
    placement = place(config)
    room = memory_of(placement.device, config).room().for_each(config.tensor_parallel_size, placement.device)
    width = config.draft_width(facts) if has_draft else 0
    try:
        weights = rank_weights(kept, config, placement.ops)
        return foreseen(kept, config, width, config.context_len(facts), room, weights), None
    except ConfigError as error:
        return None, str(error)


def _speculation(config: Config, facts: ModelFacts, hardware: HardwareFacts | None, engine: EngineFacts | None) -> str:
    """What speculation does, or why it does nothing."""
    speculative = config.speculative_config
    if speculative is None:
        reason = "it is switched off" if facts.draft_methods else f"{facts.name} carries no draft stages"
        return f"not running because {reason}"
    admission = admit(config, facts, hardware=hardware, engine=engine)
    without = admit(replace(config, speculative_config=None), facts, hardware=hardware, engine=engine)
    blocking = [sentence for sentence in admission.refusals if sentence not in without.refusals]
    if blocking:
        return f"not running because {blocking[0]}"
    return f"{speculative.method}, {config.draft_width(facts)} draft tokens a round"


def _account(folder: Path | None, plan: ModelPlan, expected: Sequence[TensorPlan], with_draft: bool) -> TensorAccount:
    """Compare the checkpoint's metadata with the inventory; a fault is reported, not raised."""
    account = TensorAccount(
        status=NOT_CHECKED,
        num_expected=len(expected),
        expected_bytes=sum(tensor.num_bytes for tensor in expected),
        num_found=None,
        found_bytes=None,
        skipped=(),
        remarks=(),
        fault=None,
    )
    if folder is None or not has_weights(folder):
        return account
    try:
        with SafetensorsFolder(folder) as source:
            account = replace(account, num_found=len(source.entries), found_bytes=source.num_bytes)
            account = replace(account, remarks=tuple(_remarks(source)))
            match = match_tensors(source.entries, expected, skip_rules(plan, with_draft=with_draft))
    except CheckpointError as error:
        return replace(account, status="refused", fault=str(error))
    return replace(account, status="every tensor accounted for", skipped=_skipped_groups(match))


def _remarks(source: SafetensorsFolder) -> Iterator[str]:
    """What is odd about a checkpoint but harms nothing."""
    if source.index_total_bytes not in (None, source.num_bytes):
        yield f"the index says total_size {source.index_total_bytes}, the shards hold {source.num_bytes} bytes"
    if source.stray_files:
        yield f"files that the index does not name are ignored: {', '.join(source.stray_files)}"


def has_weights(folder: Path) -> bool:
    """True when a folder is more than a config.json: an index, or any shard."""
    return (folder / INDEX_NAME).is_file() or any(folder.glob("*.safetensors"))


def _skipped_groups(match: Match) -> tuple[SkippedGroup, ...]:
    groups: dict[str, list[SkippedTensor]] = defaultdict(list)
    for tensor in match.skipped:
        groups[tensor.reason].append(tensor)
    return tuple(
        SkippedGroup(reason, len(tensors), sum(tensor.num_bytes for tensor in tensors))
        for reason, tensors in sorted(groups.items())
    )


def _draft_cost(expected: Sequence[TensorPlan], state: StateBytes) -> DraftCost:
    """Draft weights and windows, and the slack rows that the target's rings hold because of drafts."""
    total = sum(tensor.num_bytes for tensor in expected)
    weights = sum(tensor.num_bytes for tensor in expected if tensor.memory_class.startswith(DRAFT_PREFIX))
    windows = sum(ring.num_bytes for ring in state.rings if ring.name.startswith(DRAFT_PREFIX))
    slack = sum(
        ring.num_bytes * ring.slack_rows // ring.num_rows
        for ring in state.rings
        if not ring.name.startswith(DRAFT_PREFIX)
    )
    return DraftCost(weights, windows, slack, weights / max(1, total - weights))
