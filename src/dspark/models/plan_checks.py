"""Kinds and ranges of a plan's values: a config.json with a wrong one is refused before anything is built from it."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from types import NoneType
from typing import Any, get_args, get_type_hints

from dspark.config.errors import ConfigError
from dspark.layers.plans import CacheQuantPlan, CompressionPlan, IndexerPlan, ModelPlan

# Integers that count or measure something that every model has; all others may be 0.
_POSITIVE = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "max_positions",
        "num_heads",
        "head_dim",
        "q_rank",
        "o_rank",
        "o_groups",
        "window",
        "inner_size",
        "num_experts",
        "topk",
        "num_streams",
        "ratio",
        "block_size",
        "markov_rank",
        "compressed_vocab_size",
    }
)
# Numbers that are switched off by 0; all others divide or scale.
_MAY_BE_ZERO = frozenset({"sum_eps", "limit"})
_TOO_LARGE = 2**63
_WORDS: dict[type, str] = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}


def check_plan(plan: ModelPlan) -> None:
    """Refuse values of the wrong kind, negative integers, sizes and tolerances of zero, unknown special tokens, and
    layers that name others which have not what they need.

    Raises:
        ConfigError: names the first of them and where in the plan it stands.
    """
    if not plan.layers:
        raise ConfigError(f"config.json of a {plan.family} model has no layers: fetch the file again")
    for fault in chain(_faults("", plan), _id_faults(plan), _draft_faults(plan), _layer_faults(plan)):
        raise ConfigError(f"config.json of a {plan.family} model is wrong: {fault}; fetch the file again")


def _id_faults(plan: ModelPlan) -> Iterator[str]:
    """Special tokens that the vocabulary does not have."""
    ids = {"bos_token_id": (plan.bos_token_id,), "eos_token_id": plan.eos_token_ids}
    if plan.draft is not None:
        ids["dspark_noise_token_id"] = (plan.draft.noise_token_id,)
    for name, values in ids.items():
        for value in values:
            if value >= plan.vocab_size:
                yield f"{name} is {value}, and vocab_size is {plan.vocab_size}"


def _draft_faults(plan: ModelPlan) -> Iterator[str]:
    """Stages read features of layers that there are, and attend to a window alone."""
    if plan.draft is None:
        return
    ids, count = plan.draft.target_layer_ids, len(plan.layers)
    if not ids or len(set(ids)) < len(ids) or max(ids) >= count:
        yield f"dspark_target_layer_ids is {list(ids)}, not different ones of the {count} layers"
    for stage in plan.draft.stages:
        if stage.attention.compression is not None:
            yield f"draft stage {stage.name} has compress_ratio {stage.attention.compression.ratio}, not 0"


def _layer_faults(plan: ModelPlan) -> Iterator[str]:
    for layer in (*plan.layers, *(plan.draft.stages if plan.draft else ())):
        moe, attention = layer.moe, layer.attention
        if moe.topk > moe.num_experts:
            yield f"{layer.name} chooses {moe.topk} of {moe.num_experts} experts"
        if attention.rope.dim % 2 or attention.rope.dim > attention.head_dim:
            yield f"{layer.name} has qk_rope_head_dim {attention.rope.dim}, not even or above {attention.head_dim}"
        widths = {
            "hidden_size": layer.hidden_size,
            "q_lora_rank": attention.q_rank,
            "o_groups x o_lora_rank": attention.o_groups * attention.o_rank,
            "moe_intermediate_size": moe.inner_size,
        }
        if layer.engram is not None:
            width = (layer.engram.max_ngram - 1) * layer.engram.num_heads * layer.engram.head_dim
            widths["(engram_max_ngram_size - 1) x engram_n_heads x engram_head_dim"] = width
        for name, size in widths.items():
            if plan.quant.block and size % plan.quant.block:
                yield f"{layer.name} has {name} {size}, not a multiple of the quantised blocks' {plan.quant.block}"
        if attention.rope.yarn is not None and attention.rope.base == 1:
            yield f"{layer.name} has compress_rope_theta 1, whose rotations are all alike"
        yield from _row_faults(layer.name, "head_dim", attention.head_dim, attention.window_quant, attention.rope.dim)
        if attention.num_heads % attention.o_groups:
            yield f"{layer.name} has {attention.num_heads} heads in {attention.o_groups} equal output groups"
        if attention.compression is not None:
            own, name = attention.compression, layer.name
            yield from _row_faults(name, "head_dim", attention.head_dim, own.cache_quant, attention.rope.dim)
            if own.indexer is not None:
                yield from _index_faults(name, own.indexer, attention.rope.dim)
            yield from (f"{layer.name} {fault}" for fault in _compression_faults(plan, own))


def _row_faults(place: str, name: str, size: int, quant: CacheQuantPlan, rope_dim: int) -> Iterator[str]:
    """Rows that are no whole groups of values with one scale."""
    if (size - quant.skip_rope * rope_dim) % quant.group:
        rest = f" less qk_rope_head_dim {rope_dim}" if quant.skip_rope else ""
        yield f"{place} has {name} {size}{rest}, not a multiple of {quant.group}"


def _index_faults(place: str, plan: IndexerPlan, rope_dim: int) -> Iterator[str]:
    if rope_dim > plan.head_dim:
        yield f"{place} has index_head_dim {plan.head_dim}, below qk_rope_head_dim {rope_dim}"
    if plan.hadamard and plan.head_dim & (plan.head_dim - 1):
        yield f"{place} has index_head_dim {plan.head_dim}, not a power of two"
    yield from _row_faults(place, "index_head_dim", plan.head_dim, plan.cache_quant, rope_dim)


def _compression_faults(plan: ModelPlan, own: CompressionPlan) -> Iterator[str]:
    """Rows, picks, index keys and candidates come from layers that have them."""
    source = _compression_of(plan, own.source_layer)
    if source is None or source.compressor is None or source.ratio != own.ratio:
        yield f"takes the compressed rows of layer {own.source_layer}, which has none of ratio {own.ratio}"
    if own.pick_layer is not None:
        picker = _compression_of(plan, own.pick_layer)
        if picker is None or picker.indexer is None or picker.ratio != own.ratio:
            yield f"takes the picks of layer {own.pick_layer}, which has none of ratio {own.ratio}"
    if own.indexer is None:
        return
    keys = _compression_of(plan, own.indexer.key_layer)
    if keys is None or keys.indexer is None or not keys.indexer.owns_keys:
        yield f"scores the index keys of layer {own.indexer.key_layer}, which has none"
    chosen = own.indexer.candidates
    if chosen is not None:
        publisher = _compression_of(plan, chosen.source_layer)
        found = publisher.indexer.candidates if publisher is not None and publisher.indexer is not None else None
        if found is None or not found.publishes:
            yield f"takes the candidates of layer {chosen.source_layer}, which has none"


def _compression_of(plan: ModelPlan, index: int) -> CompressionPlan | None:
    return plan.layers[index].attention.compression if index < len(plan.layers) else None


def _faults(place: str, plan: Any) -> Iterator[str]:
    hints = get_type_hints(type(plan))
    for field in fields(plan):
        value = getattr(plan, field.name)
        yield from _value_faults(f"{place}{field.name}", field.name, value, hints[field.name])


def _value_faults(place: str, name: str, value: Any, hint: Any) -> Iterator[str]:
    if is_dataclass(value):
        yield from _faults(f"{place}.", value)
    elif isinstance(value, tuple):
        item = get_args(hint)[0]
        for number, part in enumerate(value):
            yield from _value_faults(f"{place}[{number}]", name, part, item)
    else:
        kinds = [kind for kind in (get_args(hint) or (hint,)) if kind in _WORDS]
        may_be_none = NoneType in get_args(hint)
        if kinds and not (value is None and may_be_none):
            yield from _scalar_faults(place, name, value, kinds[0])


def _scalar_faults(place: str, name: str, value: Any, kind: type) -> Iterator[str]:
    if not _is_kind(value, kind):
        yield f"{place} is {value!r}, not {_WORDS[kind]}"
    elif kind is int and value < (1 if name in _POSITIVE else 0):
        yield f"{place} is {value!r}, below {1 if name in _POSITIVE else 0}"
    elif kind is int and value >= _TOO_LARGE:
        yield f"{place} is {value!r}, more than a tensor can have"
    elif kind is float and value <= 0 and name not in _MAY_BE_ZERO:
        yield f"{place} is {value!r}, not above 0"


def _is_kind(value: Any, kind: type) -> bool:
    """Whether a value is of a kind; true and false are no numbers."""
    if kind is bool or kind is str:
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    if kind is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and math.isfinite(value)
