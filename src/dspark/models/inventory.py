"""Every tensor that a model expects of its checkpoint, derived from the plan: names, shapes, dtypes, and what for."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from dspark.checkpoint.formats import FP4_GROUP, TABLE_BLOCK, scale_shape
from dspark.checkpoint.plan import Encoding, SkipRule, TensorPlan
from dspark.layers.plans import (
    AttentionPlan,
    CompressionPlan,
    CompressorPlan,
    DraftPlan,
    EngramPlan,
    HyperPlan,
    IndexerPlan,
    LayerPlan,
    ModelPlan,
    MoePlan,
    QuantPlan,
    Storage,
)

SCALE_DTYPE = "F8_E8M0"
_PLAIN_DTYPES = {Storage.BF16: "BF16", Storage.F32: "F32", Storage.I64: "I64"}
# Draft classes carry this in front, so that a report can add up what the draft costs.
DRAFT_PREFIX = "draft "


class MemoryClass(StrEnum):
    """What bytes are for."""

    EMBEDDING = "embedding and head"
    ATTENTION = "attention"
    COMPRESSION = "compression and index"
    ROUTER = "router"
    EXPERTS = "routed experts"
    SHARED_EXPERT = "shared expert"
    HYPER = "hyper-connections"
    NORMS = "norms"
    ENGRAM = "engram projection"
    ENGRAM_TABLE = "engram tables"
    PROJECTION = "main projection"
    HEADS = "markov and confidence heads"


def expected_tensors(plan: ModelPlan, *, with_draft: bool = True) -> list[TensorPlan]:
    """All tensors of the text model in the official layout, the draft stages included unless left out.

    Args:
        plan: the whole model, or a rank's part; tensors that ranks divide then have the shape of the part.
        with_draft: also the draft stages, where the model has some.
    """
    tensors = list(_target(plan))
    if with_draft and plan.draft is not None:
        tensors += [_as_draft(tensor) for tensor in _draft(plan, plan.draft)]
    return tensors


def skip_rules(plan: ModelPlan, *, with_draft: bool = True) -> list[SkipRule]:
    """What a checkpoint of this model may hold beside the expected tensors."""
    rules = [SkipRule("vision: only text is run", plan.skipped_prefixes, plan.skipped_suffixes)]
    if not with_draft and plan.draft is not None:
        names = tuple(f"{stage.name}." for stage in plan.draft.stages)
        rules.append(SkipRule("draft stage: speculation is off", names))
    return rules


def _as_draft(tensor: TensorPlan) -> TensorPlan:
    return replace(tensor, memory_class=DRAFT_PREFIX + tensor.memory_class)


@dataclass(frozen=True)
class _Scope:
    """A name prefix, and how weights below it are stored."""

    prefix: str
    quant: QuantPlan
    layer: int = -1

    def plain(
        self, name: str, shape: tuple[int, ...], kind: MemoryClass, storage: Storage = Storage.BF16
    ) -> Iterator[TensorPlan]:
        """A tensor of plain values."""
        yield TensorPlan(self.prefix + name, shape, _PLAIN_DTYPES[storage], kind, layer=self.layer)

    def weight(self, name: str, shape: tuple[int, int], kind: MemoryClass, storage: Storage) -> Iterator[TensorPlan]:
        """`name`.weight [N, K] as stored, and `name`.scale where its values are coded."""
        match storage:
            case Storage.FP8_BLOCK:
                yield from self._coded(name, shape, kind, "fp8", (self.quant.block, self.quant.block))
            case Storage.FP8_ROW:
                yield from self._coded(name, shape, kind, "fp8", TABLE_BLOCK)
            case Storage.FP4_GROUP:
                yield from self._coded(name, shape, kind, "fp4", (1, FP4_GROUP))
            case _:
                yield from self.plain(f"{name}.weight", shape, kind, storage)

    def _coded(
        self, name: str, shape: tuple[int, int], kind: MemoryClass, encoding: Encoding, block: tuple[int, int]
    ) -> Iterator[TensorPlan]:
        weight, scale = f"{self.prefix}{name}.weight", f"{self.prefix}{name}.scale"
        dtype, stored = ("I8", (shape[0], shape[1] // 2)) if encoding == "fp4" else ("F8_E4M3", shape)
        yield TensorPlan(weight, stored, dtype, kind, encoding, scale, block, self.layer)
        yield TensorPlan(scale, scale_shape(shape, block), SCALE_DTYPE, kind, layer=self.layer)

    def dense(self, name: str, shape: tuple[int, int], kind: MemoryClass) -> Iterator[TensorPlan]:
        """A linear weight that the official files quantise."""
        return self.weight(name, shape, kind, self.quant.dense)

    def linear(self, name: str, shape: tuple[int, int], kind: MemoryClass) -> Iterator[TensorPlan]:
        """A linear weight that stays bf16."""
        return self.plain(f"{name}.weight", shape, kind)

    def norm(self, name: str, width: int, kind: MemoryClass = MemoryClass.NORMS) -> Iterator[TensorPlan]:
        return self.plain(f"{name}.weight", (width,), kind)

    def inside(self, name: str) -> "_Scope":
        return replace(self, prefix=f"{self.prefix}{name}.")


def _target(plan: ModelPlan) -> Iterator[TensorPlan]:
    top = _Scope("", plan.quant)
    yield from top.linear("embed", (plan.vocab_size, plan.hidden_size), MemoryClass.EMBEDDING)
    for layer in plan.layers:
        yield from _layer(layer, plan.quant)
    yield from top.norm("norm", plan.hidden_size)
    if plan.head_mix:
        yield from _head_mix(top, plan)
    yield from top.linear("head", (plan.num_head_rows, plan.hidden_size), MemoryClass.EMBEDDING)


def _draft(plan: ModelPlan, draft: DraftPlan) -> Iterator[TensorPlan]:
    """The stages; the first also holds the projection of target_hidden, the last the heads."""
    for stage in draft.stages:
        yield from _layer(stage, plan.quant)
    first = _Scope(f"{draft.stages[0].name}.", plan.quant, draft.stages[0].index)
    last = _Scope(f"{draft.stages[-1].name}.", plan.quant, draft.stages[-1].index)
    width = plan.hidden_size
    yield from first.dense("main_proj", (width, width * len(draft.target_layer_ids)), MemoryClass.PROJECTION)
    yield from first.norm("main_norm", width)
    yield from last.norm("norm", width)
    if plan.head_mix:
        yield from _head_mix(last, plan)
    markov, shape = last.inside("markov_head"), (plan.vocab_size, draft.markov_rank)
    yield from markov.linear(draft.markov_embed, shape, MemoryClass.HEADS)
    yield from markov.linear(draft.markov_head, shape, MemoryClass.HEADS)
    yield from last.inside("confidence_head").linear("proj", (1, width + draft.markov_rank), MemoryClass.HEADS)


def _head_mix(scope: _Scope, plan: ModelPlan) -> Iterator[TensorPlan]:
    streams = plan.hyper.num_streams
    yield from scope.plain("hc_head_fn", (streams, streams * plan.hidden_size), MemoryClass.HYPER, Storage.F32)
    yield from scope.plain("hc_head_base", (streams,), MemoryClass.HYPER, Storage.F32)
    yield from scope.plain("hc_head_scale", (1,), MemoryClass.HYPER, Storage.F32)


def _layer(layer: LayerPlan, quant: QuantPlan) -> Iterator[TensorPlan]:
    scope = _Scope(f"{layer.name}.", quant, layer.index)
    yield from _attention(scope.inside("attn"), layer.attention)
    yield from _moe(scope.inside("ffn"), layer.moe)
    for half in ("attn", "ffn"):
        yield from scope.norm(f"{half}_norm", layer.hidden_size)
        yield from _mixes(scope, half, layer.hyper, layer.hidden_size)
    if layer.engram is not None:
        yield from _engram(scope.inside("engram"), layer.engram, layer.hyper.num_streams, layer.hidden_size)


def _mixes(scope: _Scope, half: str, hyper: HyperPlan, width: int) -> Iterator[TensorPlan]:
    """pre, post and the S x S mix: (2 + S) x S outputs of the flattened S x D streams, with three scales."""
    streams = hyper.num_streams
    outputs = (2 + streams) * streams
    yield from scope.plain(f"hc_{half}_fn", (outputs, streams * width), MemoryClass.HYPER, Storage.F32)
    yield from scope.plain(f"hc_{half}_base", (outputs,), MemoryClass.HYPER, Storage.F32)
    yield from scope.plain(f"hc_{half}_scale", (3,), MemoryClass.HYPER, Storage.F32)


def _attention(scope: _Scope, plan: AttentionPlan) -> Iterator[TensorPlan]:
    kind, D, heads = MemoryClass.ATTENTION, plan.hidden_size, plan.num_heads * plan.head_dim
    yield from scope.dense("wq_a", (plan.q_rank, D), kind)
    yield from scope.norm("q_norm", plan.q_rank)
    yield from scope.dense("wq_b", (heads, plan.q_rank), kind)
    yield from scope.dense("wkv", (plan.head_dim, D), kind)
    yield from scope.norm("kv_norm", plan.head_dim)
    yield from scope.dense("wo_a", (plan.o_groups * plan.o_rank, heads // plan.o_groups), kind)
    yield from scope.dense("wo_b", (D, plan.o_groups * plan.o_rank), kind)
    yield from scope.plain("attn_sink", (plan.num_heads,), kind, Storage.F32)
    if plan.compression is not None:
        yield from _compression(scope, plan, plan.compression)


def _compression(scope: _Scope, attention: AttentionPlan, plan: CompressionPlan) -> Iterator[TensorPlan]:
    if plan.compressor is not None:
        yield from _compressor(scope.inside("compressor"), plan.compressor, attention.hidden_size)
    if plan.indexer is not None:
        yield from _indexer(scope.inside("indexer"), plan.indexer, attention)


def _compressor(scope: _Scope, plan: CompressorPlan, width: int) -> Iterator[TensorPlan]:
    kind = MemoryClass.COMPRESSION
    yield from scope.linear("wkv", (plan.projected_width, width), kind)
    if plan.has_gate:
        yield from scope.linear("wgate", (plan.projected_width, width), kind)
    if plan.position_bias:
        yield from scope.plain("ape", (plan.ratio, plan.projected_width), kind, Storage.F32)
    yield from scope.norm("norm", plan.width, kind)


def _indexer(scope: _Scope, plan: IndexerPlan, attention: AttentionPlan) -> Iterator[TensorPlan]:
    kind = MemoryClass.COMPRESSION
    yield from scope.dense("wq_b", (plan.num_heads * plan.head_dim, attention.q_rank), kind)
    yield from scope.linear("weights_proj", (plan.num_heads, attention.hidden_size), kind)
    if plan.key_compressor is not None:
        yield from _compressor(scope.inside("compressor"), plan.key_compressor, attention.hidden_size)
    elif plan.owns_keys:
        yield from scope.linear("wk", (plan.head_dim, attention.head_dim), kind)
        yield from scope.norm("k_norm", plan.head_dim, kind)


def _moe(scope: _Scope, plan: MoePlan) -> Iterator[TensorPlan]:
    gate = scope.inside("gate")
    yield from gate.plain("weight", (plan.num_experts, plan.hidden_size), MemoryClass.ROUTER)
    if plan.hash_vocab_size:
        yield from gate.plain("tid2eid", (plan.hash_vocab_size, plan.topk), MemoryClass.ROUTER, Storage.I64)
    else:
        yield from gate.plain("bias", (plan.num_experts,), MemoryClass.ROUTER, Storage.F32)
    shape = plan.inner_size, plan.hidden_size
    for expert in plan.held_experts:
        yield from _expert(scope.inside(f"experts.{expert}"), shape, MemoryClass.EXPERTS, scope.quant.experts)
    shape = plan.shared_size, plan.hidden_size
    yield from _expert(scope.inside("shared_experts"), shape, MemoryClass.SHARED_EXPERT, scope.quant.dense)


def _expert(scope: _Scope, shape: tuple[int, int], kind: MemoryClass, storage: Storage) -> Iterator[TensorPlan]:
    yield from scope.weight("w1", shape, kind, storage)
    yield from scope.weight("w2", (shape[1], shape[0]), kind, storage)
    yield from scope.weight("w3", shape, kind, storage)


def _engram(scope: _Scope, plan: EngramPlan, streams: int, width: int) -> Iterator[TensorPlan]:
    """The table, and one projection of all looked-up rows to S keys and one value."""
    looked_up = (plan.max_ngram - 1) * plan.num_heads * plan.head_dim
    table = (plan.num_rows, plan.head_dim)
    yield from scope.weight("embed", table, MemoryClass.ENGRAM_TABLE, scope.quant.engram)
    yield from scope.dense("wkv", ((streams + 1) * width // plan.parts, looked_up), MemoryClass.ENGRAM)
    yield from scope.plain("q_weight", (streams, width), MemoryClass.ENGRAM)
    yield from scope.plain("k_weight", (streams, width), MemoryClass.ENGRAM)
