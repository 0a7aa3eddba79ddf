"""What one rank holds of a model: a plan with the rank's heads, widths and experts, and its parts of stored tensors.

Divided are attention heads with their output groups, the experts (each by its inner width, or whole ones by number),
the shared expert by its inner width, the outputs of an Engram projection, and the rows of the head. A rank then
computes an addend of each half's output, and its own columns of the logits and of what Engram adds.

Whole on every rank are: norms, hyper-connections, the latent projections, the gate, the compressors, whose rows every
rank keeps, and the indexers: a sum of scores over ranks takes longer than reading the indexer's weights. Embedding and
Engram tables are only looked up, so holding them whole costs memory and no time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from dspark.checkpoint.folder import TensorSource
from dspark.checkpoint.header import TensorEntry
from dspark.checkpoint.plan import TensorPlan
from dspark.config.admission import split_faults
from dspark.config.errors import ConfigError
from dspark.layers.plans import AttentionPlan, LayerPlan, ModelPlan, MoePlan, QuantPlan
from dspark.models.facts import sharded_dimensions, smallest_piece
from dspark.parallel.shard import Shard


def shard_plan(plan: ModelPlan, shard: Shard) -> ModelPlan:
    """The plan of a rank's part of a whole model.

    Raises:
        ConfigError: a dimension is no whole number of quantisation blocks for each rank; says which numbers would do.
    """
    for fault in split_faults(sharded_dimensions(plan), shard.size, shard.whole_experts):
        raise ConfigError(fault)
    if shard.size == 1:
        return plan
    draft = plan.draft
    if draft is not None:
        draft = replace(draft, stages=tuple(_layer(stage, shard) for stage in draft.stages))
    layers = tuple(_with_engram(_layer(layer, shard), plan.quant, shard) for layer in plan.layers)
    return replace(plan, layers=layers, draft=draft, shard=shard)


def _layer(layer: LayerPlan, shard: Shard) -> LayerPlan:
    return replace(layer, attention=_attention(layer.attention, shard), moe=_moe(layer.moe, shard))


def _with_engram(layer: LayerPlan, quant: QuantPlan, shard: Shard) -> LayerPlan:
    """The projection divided where it can be; it stays whole where a block would be cut, which costs time only."""
    width = (layer.hyper.num_streams + 1) * layer.hidden_size
    if layer.engram is None or width % (shard.size * smallest_piece(quant.dense, quant)):
        return layer
    return replace(layer, engram=replace(layer.engram, parts=shard.size))


def _attention(plan: AttentionPlan, shard: Shard) -> AttentionPlan:
    return replace(plan, num_heads=len(shard.part(plan.num_heads)), o_groups=len(shard.part(plan.o_groups)))


def _moe(plan: MoePlan, shard: Shard) -> MoePlan:
    plan = replace(plan, shared_size=len(shard.part(plan.shared_size)))
    if shard.whole_experts:
        return replace(plan, held=shard.part(plan.num_experts))
    return replace(plan, inner_size=len(shard.part(plan.inner_size)))


@dataclass(frozen=True)
class Part:
    """The rows and columns of a stored tensor that a rank holds; None is all of them."""

    rows: slice | None = None
    columns: slice | None = None


def stored_parts(whole: Iterable[TensorPlan], held: Iterable[TensorPlan], rank: int) -> dict[str, Part]:
    """Which part of each tensor a rank holds, by name, read off the shapes that the whole and the rank's plan expect.

    A dimension that is smaller in the rank's plan is divided, and ranks hold its parts in their order. Example: of
    w2 [4096, 2048] rank 1 of 4 expects [4096, 512], which are columns 512 to 1023; of its scales [32, 16] it expects
    [32, 4]: columns 4 to 7.

    Args:
        whole, held: what the whole plan and the rank's plan expect; `held` names no others than `whole`.
    """
    shapes = {plan.name: plan.shape for plan in whole}
    return {plan.name: _part(shapes[plan.name], plan.shape, rank) for plan in held}


def _part(whole: tuple[int, ...], held: tuple[int, ...], rank: int) -> Part:
    cuts = [
        None if size == share else slice(rank * share, (rank + 1) * share)
        for size, share in zip(whole, held, strict=True)
    ]
    return Part(*cuts)


class PartSource:
    """The parts that one rank holds of another source's tensors, each read as if it were all there is."""

    def __init__(self, source: TensorSource, parts: Mapping[str, Part]) -> None:
        self._source = source
        self._parts = parts

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Of the whole tensors."""
        return self._source.entries

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """This rank's part of a tensor, whole."""
        assert rows is None and columns is None, "a rank's part is read whole"
        part = self._parts[name]
        return self._source.read(name, part.rows, part.columns)

    def mapped(self, name: str) -> Tensor:
        """A tensor that every rank holds whole."""
        assert self._parts[name] == Part(), "only whole tensors are mapped"
        return self._source.mapped(name)
