"""Every rule that decides whether a configuration runs: one function a rule, each refusal a sentence with a remedy.

What a rule needs from the model or the machine arrives as plain numbers (`dspark.config.facts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark.config.compilation import CUDAGraphMode
from dspark.config.facts import EngineFacts, HardwareFacts, ModelFacts, ShardedDimension
from dspark.config.notes import NOTES, REMARKS
from dspark.config.question import Question, Rule, counted

if TYPE_CHECKING:
    from dspark.config.engine import Config

UNPACKED_KV_DTYPES = ("bf16", "fp32")
OFFERED_PARALLEL_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Admission:
    """The verdict.

    Attributes:
        refusals: a configuration runs when there are none.
        notes: what is ignored, or costs something, and changes what the user gets.
        remarks: where the engine carries a setting out in another way, with the same tokens.
    """

    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_admitted(self) -> bool:
        return not self.refusals


def admit(
    config: Config,
    facts: ModelFacts,
    *,
    draft: ModelFacts | None = None,
    hardware: HardwareFacts | None = None,
    engine: EngineFacts | None = None,
) -> Admission:
    """Apply every rule.

    Args:
        config: the settings.
        facts: the target.
        draft: the drafter's own facts where it comes from another folder than the target.
        hardware: the devices; None skips the rules that must know them (a dry run on another machine).
        engine: what will run it; None skips the rules about what an engine lacks.
    """
    question = Question(config, facts, draft, hardware, engine)
    return Admission(*(_sentences(rules, question) for rules in (REFUSALS, NOTES, REMARKS)))


def _sentences(rules: tuple[Rule, ...], question: Question) -> tuple[str, ...]:
    return tuple(sentence for rule in rules for sentence in rule(question))


def refuse_parallel_split(question: Question) -> Iterator[str]:
    """Each rank must hold whole units of every divided dimension."""
    config = question.config
    yield from split_faults(question.facts.sharded, config.tensor_parallel_size, config.enable_expert_parallel)


def split_faults(dimensions: Iterable[ShardedDimension], size: int, whole_experts: bool) -> Iterator[str]:
    """The sentence that refuses to divide dimensions by `size` ranks, if any is no whole number of units for each."""
    layout = "expert_parallel" if whole_experts else "tensor_parallel"
    divided = [item for item in dimensions if item.when in ("always", layout)]
    failing = [item for item in divided if not item.divides_by(size)]
    if not failing:
        return
    reasons = "; ".join(
        f"{item.name} {item.size}" + (f" in units of {item.unit}" if item.unit > 1 else "") for item in failing
    )
    possible = [n for n in OFFERED_PARALLEL_SIZES if all(item.divides_by(n) for item in divided)]
    yield f"tensor_parallel_size {size} does not divide this model: {reasons}; use {_one_of(possible)}."


def refuse_packed_kv(question: Question) -> Iterator[str]:
    """Rows of the draft's and the target's rings are read back as they were written, so they stay unpacked."""
    dtype = question.config.kv_cache_dtype
    if dtype in UNPACKED_KV_DTYPES:
        return
    if question.speculative is not None:
        yield (
            f"kv_cache_dtype {dtype} packs several rows' scales and values together and is not admitted under "
            'speculation; use kv_cache_dtype="bf16".'
        )
    else:
        yield f'kv_cache_dtype {dtype} is not offered; use kv_cache_dtype="bf16".'


def refuse_method(question: Question) -> Iterator[str]:
    """The checkpoint must carry the drafter that is asked for."""
    if question.speculative is None:
        return
    method = question.speculative.method
    source = question.draft or question.facts
    if method not in source.draft_methods:
        carried = _one_of(source.draft_methods) if source.draft_methods else "none"
        yield (
            f"method {method} needs draft stages that {source.name} does not carry (drafters in it: {carried}); "
            "use a checkpoint with them, or switch speculation off."
        )


def refuse_other_release(question: Question) -> Iterator[str]:
    """A drafter trained on another target proposes with the wrong hidden states."""
    if question.speculative is None or question.draft is None:
        return
    if question.draft.fingerprint != question.facts.fingerprint:
        yield (
            f"the drafter in {question.speculative.model} ({question.draft.name}, release "
            f"{question.draft.fingerprint[:12] or 'unknown'}) does not belong to the target "
            f"({question.facts.name}, release {question.facts.fingerprint[:12] or 'unknown'}); "
            f"use the draft stages that ship with {question.config.model or 'the embedded model'}."
        )


def refuse_wide_draft(question: Question) -> Iterator[str]:
    """Positions behind the trained block were never trained."""
    if question.speculative is None or question.speculative.dspark_config.allow_untrained_width:
        return
    trained = (question.draft or question.facts).draft_block_size
    if trained and question.width > trained:
        yield (
            f"num_speculative_tokens {question.width} is above the trained block size {trained}; use {trained} or "
            "fewer, or set allow_untrained_width and expect lower acceptance."
        )


def refuse_relaxed_acceptance(question: Question) -> Iterator[str]:
    if question.speculative is not None and question.speculative.acceptance_method == "relaxed":
        yield (
            'relaxed acceptance changes the output and is not admitted; use acceptance_method="exact", and '
            'SamplingParams(sampler="ratio") for the highest acceptance.'
        )


def refuse_forced_acceptance(question: Question) -> Iterator[str]:
    """Forced acceptance draws its own accept pattern, so nothing else may decide it."""
    spec = question.speculative
    if spec is None or not spec.forces_acceptance:
        return
    length, rate = spec.spec_decode_acceptance_length, spec.spec_decode_acceptance_rate
    if length is not None and rate is not None:
        yield (
            f"spec_decode_acceptance_length {length:g} and spec_decode_acceptance_rate {rate:g} say the same thing "
            "twice; set one of them."
        )
    if length is not None and question.width and length > question.width + 1:
        yield (
            f"spec_decode_acceptance_length {length:g} is above {question.width + 1}, the most that "
            f"{question.width} draft tokens and the bonus can give; lower it."
        )
    if spec.dspark_config.uses_confidence:
        yield (
            f"forced acceptance together with the confidence schedule {spec.dspark_config.schedule} would measure "
            'neither; use schedule="fixed", or drop the forced acceptance.'
        )


def refuse_schedule(question: Question) -> Iterator[str]:
    """Each schedule needs its own settings, and no setting is read silently by none."""
    if question.speculative is None:
        return
    dspark = question.speculative.dspark_config
    if dspark.schedule == "throughput" and dspark.calibration_profile is None:
        yield (
            "schedule throughput needs the cost table of a calibration_profile; run `dspark calibrate` and pass the "
            'file, or use schedule="fixed".'
        )
    if dspark.schedule == "fixed" and dspark.calibration_profile is not None:
        yield (
            f"calibration_profile {dspark.calibration_profile} is given but schedule fixed reads none; use "
            'schedule="throughput" or "threshold", or drop the profile.'
        )
    if dspark.schedule == "threshold" and dspark.draft_confidence_threshold is None:
        yield 'schedule threshold needs draft_confidence_threshold in (0, 1]; set it, or use schedule="fixed".'
    if dspark.schedule != "threshold" and dspark.draft_confidence_threshold is not None:
        yield (
            f"draft_confidence_threshold {dspark.draft_confidence_threshold:g} is given but schedule "
            f'{dspark.schedule} reads none; use schedule="threshold", or drop the threshold.'
        )
    if dspark.uses_confidence and question.speculative.method != "dspark":
        yield (
            f"schedule {dspark.schedule} needs a confidence head, which method {question.speculative.method} lacks; "
            'use schedule="fixed".'
        )


def refuse_small_batch(question: Question) -> Iterator[str]:
    """One step must be able to carry a full verification of every running request."""
    config, needed = question.config, question.config.max_num_seqs * (1 + question.width)
    if config.max_num_batched_tokens < needed:
        yield (
            f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs} x "
            f"(1 + num_speculative_tokens {question.width}) = {needed}; raise it to {needed} or lower the others."
        )


def refuse_long_context(question: Question) -> Iterator[str]:
    limit, asked = question.facts.max_position_embeddings, question.config.max_model_len
    if asked is not None and asked > limit:
        yield f"max_model_len {asked} is above the {limit} positions of {question.facts.name}; use {limit} or less."


def refuse_graphs(question: Question) -> Iterator[str]:
    """Graphs need a device that captures them, and eager means none."""
    config, compilation = question.config, question.config.compilation_config
    if compilation.level > 0:
        yield f"compilation level {compilation.level} is not offered: kernels are chosen with the model; use level=0."
    mode = compilation.cudagraph_mode
    if mode in (CUDAGraphMode.AUTO, CUDAGraphMode.NONE):
        is_captured = mode is CUDAGraphMode.AUTO and not config.enforce_eager and _may_have_graphs(question)
        if compilation.cudagraph_capture_sizes and not is_captured:
            yield (
                f"cudagraph_capture_sizes {compilation.cudagraph_capture_sizes} are given but nothing is captured with "
                f"cudagraph_mode {mode.value} here; drop the sizes, or capture graphs on a device that can."
            )
        return
    if config.enforce_eager:
        yield f"enforce_eager and cudagraph_mode {mode.value} contradict each other; drop one of them."
    if not _may_have_graphs(question):
        yield f'cudagraph_mode {mode.value} needs a device that captures graphs and the CPU does not; use "none".'


def refuse_engram_tables(question: Question) -> Iterator[str]:
    """Kernels read what is pinned; what is mapped the host reads, between two launches."""
    config, mode = question.config, question.config.compilation_config.cudagraph_mode
    if not question.facts.has_engram or question.hardware is None:
        return
    if config.engram_tables == "pinned" and not _runs_on_cuda(question):
        yield 'engram_tables pinned needs an accelerator that reads them; use "device" or "mapped".'
    is_eager = config.enforce_eager or mode is CUDAGraphMode.NONE
    if config.engram_tables == "mapped" and _may_have_graphs(question) and not is_eager:
        yield (
            "engram_tables mapped are read by the host, which no captured pass can wait for; use "
            'engram_tables="pinned", or enforce_eager.'
        )


def refuse_engine(question: Question) -> Iterator[str]:
    """What is asked for must be something that this engine does."""
    config, engine = question.config, question.engine
    if engine is None:
        return
    if config.device not in ("auto", *engine.devices):
        yield (
            f"device {config.device} is asked for but {engine.name} has no kernels for it; use "
            f'device="{engine.devices[0]}" or "auto".'
        )
    if config.tensor_parallel_size > engine.max_ranks:
        yield (
            f"tensor_parallel_size {config.tensor_parallel_size} is asked for but {engine.name} runs "
            f"at most {counted(engine.max_ranks, 'rank')}; lower it."
        )


def refuse_hardware(question: Question) -> Iterator[str]:
    """The devices asked for must be there."""
    config, hardware = question.config, question.hardware
    if hardware is None:
        return
    if config.device == "cuda" and hardware.kind != "cuda":
        yield 'device cuda is asked for but this machine shows none; use device="cpu" or "auto".'
    elif _runs_on_cuda(question) and config.tensor_parallel_size > hardware.num_devices:
        yield (
            f"tensor_parallel_size {config.tensor_parallel_size} needs as many devices and {hardware.num_devices} "
            "are visible; lower it."
        )


def _runs_on_cuda(question: Question) -> bool:
    return question.config.device != "cpu" and question.hardware is not None and question.hardware.kind == "cuda"


def _may_have_graphs(question: Question) -> bool:
    if question.config.device == "cpu" or (question.engine is not None and "cuda" not in question.engine.devices):
        return False
    return question.hardware is None or (question.hardware.kind == "cuda" and question.hardware.has_graphs)


def _one_of(values: tuple[str, ...] | list[int]) -> str:
    return " or ".join(str(value) for value in values)


REFUSALS: tuple[Rule, ...] = (
    refuse_parallel_split,
    refuse_packed_kv,
    refuse_method,
    refuse_other_release,
    refuse_wide_draft,
    refuse_relaxed_acceptance,
    refuse_forced_acceptance,
    refuse_schedule,
    refuse_small_batch,
    refuse_long_context,
    refuse_graphs,
    refuse_engram_tables,
    refuse_engine,
    refuse_hardware,
)
