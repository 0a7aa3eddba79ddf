"""What admission must know of a model, taken from its plan."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dspark.checkpoint.formats import FP4_GROUP
from dspark.config.facts import ModelFacts, ShardedDimension
from dspark.layers.plans import AttentionPlan, ModelPlan, MoePlan, QuantPlan, Storage


def model_facts(plan: ModelPlan, *, fingerprint: str = "", has_vision: bool = False) -> ModelFacts:
    """The numbers that the rules of admission compare.

    Args:
        plan: the whole model.
        fingerprint: identity of the release that the weights come from.
        has_vision: the checkpoint also holds a vision tower.
    """
    return ModelFacts(
        name=plan.family,
        max_position_embeddings=plan.max_positions,
        vocab_size=plan.vocab_size,
        draft_methods=("dspark",) if plan.draft else (),
        draft_block_size=plan.draft.block_size if plan.draft else 0,
        sharded=sharded_dimensions(plan),
        fingerprint=fingerprint,
        has_vision=has_vision,
        has_engram=plan.ngrams is not None,
    )


def has_vision(settings: Mapping[str, Any]) -> bool:
    """True when a config.json describes a vision tower beside the text model."""
    vision = settings.get("vision_config")
    return isinstance(vision, Mapping) and bool(vision.get("num_hidden_layers"))


def sharded_dimensions(plan: ModelPlan) -> tuple[ShardedDimension, ...]:
    """Every dimension that ranks divide; equal ones of many layers count once."""
    return tuple(dict.fromkeys(_sharded(plan)))


def _sharded(plan: ModelPlan) -> Iterator[ShardedDimension]:
    yield ShardedDimension("vocabulary", plan.vocab_size)
    for layer in (*plan.layers, *(plan.draft.stages if plan.draft else ())):
        yield from _attention_dimensions(layer.attention, plan.quant)
        yield from _expert_dimensions(layer.moe, plan.quant)


def _attention_dimensions(plan: AttentionPlan, quant: QuantPlan) -> Iterator[ShardedDimension]:
    """A rank takes whole heads and whole output groups; their weights must be cut between quantisation blocks."""
    unit = smallest_piece(quant.dense, quant)
    yield ShardedDimension("attention heads", plan.num_heads)
    yield ShardedDimension("output groups", plan.o_groups)
    yield ShardedDimension("query width", plan.num_heads * plan.head_dim, unit)
    yield ShardedDimension("output rank", plan.o_groups * plan.o_rank, unit)


def _expert_dimensions(plan: MoePlan, quant: QuantPlan) -> Iterator[ShardedDimension]:
    yield ShardedDimension("routed experts", plan.num_experts, when="expert_parallel")
    # What enters the second product of an expert is quantised in groups as wide as a block, and they stay whole too.
    unit = math.lcm(smallest_piece(quant.experts, quant), max(quant.block, 1))
    yield ShardedDimension("expert width", plan.inner_size, unit, when="tensor_parallel")
    yield ShardedDimension("shared expert width", plan.shared_size, smallest_piece(quant.dense, quant))


def smallest_piece(storage: Storage, quant: QuantPlan) -> int:
    """Rows or columns of a weight that must stay together so that its scales stay whole."""
    match storage:
        case Storage.FP8_BLOCK:
            return quant.block
        case Storage.FP4_GROUP | Storage.FP8_ROW:
            return FP4_GROUP
        case _:
            return 1
