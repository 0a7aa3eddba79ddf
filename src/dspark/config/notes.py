"""What a user is told of an admitted configuration: notes change what they get, remarks do not."""

from __future__ import annotations

from collections.abc import Iterator

from dspark.config.question import Question, Rule, counted

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


def note_wide_draft(question: Question) -> Iterator[str]:
    if question.speculative is None or not question.speculative.dspark_config.allow_untrained_width:
        return
    trained = (question.draft or question.facts).draft_block_size
    if trained and question.width > trained:
        yield f"num_speculative_tokens {question.width} is above the trained block size {trained}: acceptance falls."


def note_forced_acceptance(question: Question) -> Iterator[str]:
    if question.speculative is not None and question.speculative.forces_acceptance:
        forced = question.speculative.forced_accepted_len(question.width)
        yield f"acceptance is forced to a mean accepted length of {forced:g}: the text is meaningless."


def note_expert_parallel(question: Question) -> Iterator[str]:
    if question.config.enable_expert_parallel and question.config.tensor_parallel_size == 1:
        yield "enable_expert_parallel has no effect with tensor_parallel_size 1."


def note_rank_timeouts(question: Question) -> Iterator[str]:
    """One rank waits for nobody."""
    config = question.config
    if config.tensor_parallel_size > 1:
        return
    for name in ("rank_timeout_s", "rank_setup_timeout_s"):
        value = getattr(config, name)
        if value != getattr(type(config), name):
            yield f"{name} {value:g} has no effect with tensor_parallel_size 1."


def note_prefix_interval(question: Question) -> Iterator[str]:
    config = question.config
    if config.prefix_cache_interval is not None and not config.enable_prefix_caching:
        yield f"prefix_cache_interval {config.prefix_cache_interval} has no effect without enable_prefix_caching."


def note_idle_devices(question: Question) -> Iterator[str]:
    engine = question.engine
    if engine is not None and engine.idle_devices and question.config.device == "auto":
        yield (
            f"device auto takes the CPU and leaves {counted(engine.idle_devices, 'accelerator')} idle: {engine.name} "
            "has no kernels for them."
        )


def note_memory_share(question: Question) -> Iterator[str]:
    engine, share = question.engine, question.config.gpu_memory_utilization
    on_gpu = question.config.device != "cpu" and question.hardware is not None and question.hardware.kind == "cuda"
    if engine is not None and not on_gpu and share != DEFAULT_GPU_MEMORY_UTILIZATION:
        yield (
            f"gpu_memory_utilization {share:g} is ignored: on the CPU {engine.name} sizes its stores by the memory "
            "that the machine has free."
        )


def note_fast(question: Question) -> Iterator[str]:
    if question.config.exactness == "fast":
        yield (
            "exactness fast: products may be those of the vendor's library, so the tokens of a request may depend on "
            "who shares its batch, and drafts may change them."
        )


def note_engram_tables(question: Question) -> Iterator[str]:
    place = question.config.engram_tables
    if place != "device" and not question.facts.has_engram:
        yield f"engram_tables {place} has no effect: {question.facts.name} has no Engram tables."


def note_vision(question: Question) -> Iterator[str]:
    if question.facts.has_vision:
        yield "the vision tower is not loaded: text requests only."


def note_plain(question: Question) -> Iterator[str]:
    if question.speculative is None and question.facts.draft_methods:
        yield "speculation is not running because it is switched off; the draft stages are not loaded."
    elif question.speculative is None:
        yield f"speculation is not running because {question.facts.name} carries no draft stages."


def remark_index_cache(question: Question) -> Iterator[str]:
    engine, asked = question.engine, question.config.index_cache_dtype
    if engine is not None and asked != engine.index_cache_dtype:
        yield (
            f"index_cache_dtype {asked}: {engine.name} stores index keys as {engine.index_cache_dtype}, which holds "
            "the same values in more bytes."
        )


NOTES: tuple[Rule, ...] = (
    note_wide_draft,
    note_forced_acceptance,
    note_expert_parallel,
    note_rank_timeouts,
    note_prefix_interval,
    note_idle_devices,
    note_memory_share,
    note_fast,
    note_engram_tables,
    note_vision,
    note_plain,
)
REMARKS: tuple[Rule, ...] = (remark_index_cache,)
