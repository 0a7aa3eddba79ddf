"""The least time of a pass: bytes that must move, over what the memory moves a second; from the plan alone.

Every weight that a pass reads is read once, whatever the number of rows; of the routed experts, those that some row is
sent to. Under uniform routing n rows with k of E experts each touch E x (1 - (1 - k/E)^n) of them. Activations, logits
and written rows are left out: a kernel could keep them on the chip.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dspark.checkpoint.plan import TensorPlan
from dspark.layers.plans import AttentionPlan, LayerPlan, ModelPlan, Storage
from dspark.models.inventory import DRAFT_PREFIX, MemoryClass, expected_tensors
from dspark.models.sharding import shard_plan
from dspark.parallel.shard import Shard

BANDWIDTH = 4.3e12  # bytes a second of a large copy on one H200
PEAK_FLOPS = 780e12  # bf16 products on one H200
_HEAD, _KV, _INDEX = "head", "KV rows", "index keys"
_LOOKUP = "looked-up rows"
_MARKOV = "markov steps"

Parts = defaultdict[str, float]


@dataclass(frozen=True)
class Load:
    """A decode step. rows: rows of each request in the pass. context: tokens that each request has."""

    num_requests: int
    rows: int
    context: int

    @property
    def num_rows(self) -> int:
        """Rows of the whole pass."""
        return self.num_requests * self.rows


@dataclass(frozen=True)
class PassCost:
    """Bytes of one pass on each rank.

    Attributes:
        parts: bytes by what they are for.
        experts: mean distinct experts a layer.
        flops: of all ranks.
    """

    parts: Mapping[str, float]
    experts: float
    flops: float = 0.0

    @property
    def num_bytes(self) -> float:
        """All bytes of one rank."""
        return sum(self.parts.values())

    def ms(self, bandwidth: float = BANDWIDTH) -> float:
        """Least time."""
        return 1e3 * self.num_bytes / bandwidth


@dataclass(frozen=True)
class Roofline:
    """Costs of a plan on `ranks` devices.

    Attributes:
        value_bytes, index_bytes: of one value of a cached row and of an index key.
        distinct: measured distinct experts in place of the expected ones, by (kind of pass, rows); kinds are "target"
            and "draft".
    """

    plan: ModelPlan
    ranks: int = 1
    value_bytes: int = 2
    index_bytes: int = 2
    distinct: Mapping[tuple[str, int], float] = field(default_factory=dict)

    @cached_property
    def _tensors(self) -> list[TensorPlan]:
        """All but the routed experts, which are most of the tensors and all alike."""
        experts = (MemoryClass.EXPERTS, DRAFT_PREFIX + MemoryClass.EXPERTS)
        return [one for one in expected_tensors(self.plan) if one.memory_class not in experts]

    @cached_property
    def _held_bytes(self) -> dict[str, int]:
        """What one rank holds of each tensor."""
        return {one.name: one.num_bytes for one in expected_tensors(shard_plan(self.plan, Shard(0, self.ranks)))}

    def target(self, load: Load) -> PassCost:
        """A target pass."""
        own = [one for one in self._tensors if not one.memory_class.startswith(DRAFT_PREFIX)]
        parts = self._dense(own)
        experts = self._add_experts(parts, self.plan.layers, load.num_rows, "target")
        for layer in self.plan.layers:
            self._add_rows(parts, layer, load)
        parts[_LOOKUP] += load.num_rows * self.plan.hidden_size * 2
        return PassCost(dict(parts), experts, self._flops(own, self.plan.layers, load.num_rows))

    def draft(self, load: Load) -> PassCost:
        """A draft pass over blocks of `load.rows` positions, its Markov steps, and the projection of committed rows."""
        draft = self.plan.draft
        assert draft is not None
        own = [one for one in self._tensors if one.memory_class.startswith(DRAFT_PREFIX)]
        parts = self._dense(own)
        head = [one for one in self._tensors if one.name == "head.weight"]
        parts[_HEAD] += self._dense(head)[_HEAD]
        # Each step of the loop goes through the Markov head anew, which is larger than the cache at real sizes. A floor
        # counts a part of it only, though every rank of this engine walks over the whole.
        parts[_MARKOV] += load.rows * parts.pop(MemoryClass.HEADS, 0.0) / self.ranks
        experts = self._add_experts(parts, draft.stages, load.num_rows, "draft")
        for stage in draft.stages:
            self._add_rows(parts, stage, load)
        return PassCost(dict(parts), experts, self._flops([*own, *head], draft.stages, load.num_rows))

    def _dense(self, tensors: Iterable[TensorPlan]) -> Parts:
        """Bytes of one rank of all that every pass reads, by class; of tables only looked-up rows are read."""
        draft = self.plan.draft
        lookups = {"embed.weight"}
        if draft is not None:
            lookups.add(f"{draft.stages[-1].name}.markov_head.{draft.markov_embed}.weight")
        parts: Parts = defaultdict(float)
        for one in tensors:
            kind = one.memory_class.removeprefix(DRAFT_PREFIX)
            if kind == MemoryClass.ENGRAM_TABLE or one.name in lookups or one.dtype == "I64":
                continue
            if one.name == "head.weight":
                kind = _HEAD
            parts[kind] += self._held_bytes[one.name]
        return parts

    def _add_experts(self, parts: Parts, layers: tuple[LayerPlan, ...], num_rows: int, kind: str) -> float:
        """Routed experts; returns the mean number of distinct ones a layer."""
        touched = []
        for layer in layers:
            moe = layer.moe
            measured = self.distinct.get((kind, num_rows))
            count = expected_experts(moe.num_experts, moe.topk, num_rows) if measured is None else measured
            touched.append(count)
            size = 3 * moe.inner_size * moe.hidden_size * _bits(self.plan.quant.experts, self.plan.quant.block) / 8
            parts[MemoryClass.EXPERTS] += count * size / self.ranks
            if moe.hash_vocab_size:
                parts[_LOOKUP] += num_rows * moe.topk * 8
        return sum(touched) / len(touched)

    def _add_rows(self, parts: Parts, layer: LayerPlan, load: Load) -> None:
        """Cached rows and index keys that attention reads; every rank holds all of them."""
        values, keys = attention_reads(layer.attention, self._picks_of(layer), load)
        parts[_KV] += values * layer.attention.head_dim * self.value_bytes
        if layer.attention.compression is not None and layer.attention.compression.indexer is not None:
            parts[_INDEX] += keys * layer.attention.compression.indexer.head_dim * self.index_bytes
        if layer.engram is not None:
            looked_up = (layer.engram.max_ngram - 1) * layer.engram.num_heads * layer.engram.head_dim
            parts[_LOOKUP] += load.num_rows * looked_up * _bits(self.plan.quant.engram, 32) / 8

    def _picks_of(self, layer: LayerPlan) -> int | None:
        """Rows that a layer picks, by itself or by the layer whose picks it takes; None where it attends to all."""
        compression = layer.attention.compression
        if compression is None or compression.pick_layer is None:
            return None
        picker = self.plan.layers[compression.pick_layer].attention.compression
        assert picker is not None and picker.indexer is not None
        return picker.indexer.topk

    def _flops(self, tensors: Iterable[TensorPlan], layers: tuple[LayerPlan, ...], num_rows: int) -> float:
        """Multiplications and additions of the products; attention over cached rows is left out."""
        dense = sum(
            _num_values(one)
            for one in tensors
            if not one.memory_class.endswith((MemoryClass.ENGRAM_TABLE, MemoryClass.EMBEDDING))
            or one.name == "head.weight"
        )
        routed = sum(layer.moe.topk * 3 * layer.moe.inner_size * layer.moe.hidden_size for layer in layers)
        return 2.0 * num_rows * (dense + routed)


@dataclass(frozen=True)
class RooflineRow:
    """Floors of plain decoding and of rounds at one number of requests.

    Attributes:
        num_rows: rows of a round's target pass.
        plain: a target pass of one row a request.
        target, draft: the passes of a round with a full verify.
        gain: rounds over plain decoding at the accepted length.
    """

    num_requests: int
    num_rows: int
    plain: PassCost
    target: PassCost
    draft: PassCost | None
    gain: float | None

    def round_ms(self, bandwidth: float) -> float:
        """Least time of a round."""
        return self.target.ms(bandwidth) + (self.draft.ms(bandwidth) if self.draft else 0.0)


def roofline_rows(model: Roofline, requests: Iterable[int], context: int, accepted_len: float) -> list[RooflineRow]:
    """Floors by number of requests; every request verifies the whole block of its draft."""
    rows = []
    for count in requests:
        plain = model.target(Load(count, 1, context))
        draft_plan = model.plan.draft
        if draft_plan is None:
            rows.append(RooflineRow(count, count, plain, plain, None, None))
            continue
        block = draft_plan.block_size
        target = model.target(Load(count, 1 + block, context))
        draft = model.draft(Load(count, block, context))
        gain = accepted_len * plain.num_bytes / (target.num_bytes + draft.num_bytes)
        rows.append(RooflineRow(count, count * (1 + block), plain, target, draft, gain))
    return rows


def compute_bound_rows(model: Roofline, context: int, bandwidth: float, flops: float) -> int | None:
    """Rows of a target pass from which its products take longer than its bytes; None above 65,536."""
    low, high = 1, 2**16

    def is_bound(rows: int) -> bool:
        cost = model.target(Load(rows, 1, context))
        return cost.flops / model.ranks / flops > _weight_bytes(cost) / bandwidth

    if not is_bound(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bound(middle) else (middle + 1, high)
    return low


def expected_experts(num_experts: int, topk: int, num_rows: int) -> float:
    """Distinct experts of uniformly routed rows: 6 rows with 6 of 256 touch 33.9."""
    return num_experts * (1.0 - (1.0 - topk / num_experts) ** num_rows)


def attention_reads(plan: AttentionPlan, topk: int | None, load: Load) -> tuple[int, int]:
    """Cached rows and index keys that a pass reads in one layer at least.

    Rows of one request share their window and the keys that they score, and at best they pick the same rows.

    Args:
        topk: compressed rows that a row picks; None where it attends to all of them.
    """
    values, keys, compression = min(load.context, plan.window), 0, plan.compression
    if compression is not None:
        length = load.context // compression.ratio
        values += length if topk is None else min(length, topk)
        if compression.indexer is not None:
            candidates = compression.indexer.candidates
            is_restricted = candidates is not None and not candidates.publishes
            keys = (
                min(length, candidates.num_blocks * candidates.block_size) if is_restricted and candidates else length
            )
    return load.num_requests * values, load.num_requests * keys


def _bits(storage: Storage, block: int) -> float:
    """Bits of one stored weight, its share of the scale included."""
    match storage:
        case Storage.FP4_GROUP:
            return 4 + 8 / 32
        case Storage.FP8_ROW:
            return 8 + 8 / 32
        case Storage.FP8_BLOCK:
            return 8 + 8 / block**2
        case Storage.F32:
            return 32
        case _:
            return 16


def _num_values(one: TensorPlan) -> int:
    """Weights of a product; scales, biases and norms are none."""
    if len(one.shape) != 2 or one.dtype in ("F8_E8M0", "I64"):
        return 0
    count = one.shape[0] * one.shape[1]
    return 2 * count if one.encoding == "fp4" else count


def _weight_bytes(cost: PassCost) -> float:
    """Bytes that do not grow with each request."""
    return sum(size for kind, size in cost.parts.items() if kind not in (_KV, _INDEX, _LOOKUP))


def as_json(rows: Iterable[RooflineRow], bandwidth: float) -> list[dict[str, Any]]:
    """Rows for programs; bytes are of one rank."""
    return [
        {
            "requests": row.num_requests,
            "rows": row.num_rows,
            "plain": _cost_json(row.plain, bandwidth),
            "target": _cost_json(row.target, bandwidth),
            "draft": _cost_json(row.draft, bandwidth) if row.draft else None,
            "round_ms": row.round_ms(bandwidth),
            "gain": row.gain,
        }
        for row in rows
    ]


def _cost_json(cost: PassCost, bandwidth: float) -> dict[str, Any]:
    parts = {str(kind): size for kind, size in cost.parts.items() if size}
    return {"ms": cost.ms(bandwidth), "bytes": cost.num_bytes, "distinct_experts": cost.experts, "parts": parts}
