"""Memory of a model's weights: before they are read, from the plan alone, and once they are there."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dspark.checkpoint.plan import TensorPlan
from dspark.layers.plans import ModelPlan
from dspark.models.build import Model
from dspark.models.inventory import MemoryClass, expected_tensors
from dspark.models.names import place_of
from dspark.models.packed_weights import packable
from dspark.ops.opset import OpSet
from dspark.ops.packing import PackedWeight
from dspark.ops.table import StoredTable, TablePlace
from dspark.parallel.group import ALONE, RankGroup


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters are made without memory; buffers keep their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def model_without_memory(
    plan: ModelPlan, ops: OpSet, dtype: torch.dtype = torch.float32, ranks: RankGroup = ALONE
) -> Model:
    """A model whose parameters have shapes and no values; `ranks` share it where the plan is that of a part."""
    with _EmptyOnMeta():
        return Model(plan, ops, dtype, ranks)


def packed_parts(model: Model) -> dict[str, list[TensorPlan]]:
    """Stored tensors of each weight that the products read as it is stored; none where they read float32 only."""
    if not model.target.ops.reads_codes:
        return {}
    tensors = expected_tensors(model.plan)
    scales = {one.scale for one in tensors if one.scale}
    return packable([one for one in tensors if one.name not in scales], model)


def planned_bytes(plan: ModelPlan, ops: OpSet, engram_tables: TablePlace = TablePlace.DEVICE) -> int:
    """Memory of a model's weights as `ops` reads them, to a percent, before there are any.

    Args:
        engram_tables: where they lie; those of the host take nothing here.
    """
    model = model_without_memory(plan, ops)
    packed = packed_parts(model)
    coded = sum(one.num_bytes for parts in packed.values() for one in parts)
    # Scales of coded weights: a byte for 32 columns, of as many rows as share one.
    scales = sum(
        math.prod(one.shape) * (2 if one.encoding == "fp4" else 1) // (32 * one.block[0])
        for parts in packed.values()
        for one in parts
        if one.block is not None
    )
    tables = _stored_tables(model) if ops.reads_codes or engram_tables is not TablePlace.DEVICE else {}
    beside = sum(tables.values()) if engram_tables is TablePlace.DEVICE else 0
    elsewhere = packed.keys() | tables.keys()
    plain = sum(4 * value.numel() for name, value in model.named_parameters() if name not in elsewhere)
    routes = sum(8 * value.numel() for name, value in model.named_buffers() if name.endswith("tid2eid"))
    return coded + scales + beside + plain + routes


def _stored_tables(model: Model) -> dict[str, int]:
    """Bytes of each Engram table as it is stored, by the path of its parameter."""
    sizes: dict[str, int] = {}
    for one in expected_tensors(model.plan):
        if one.memory_class == MemoryClass.ENGRAM_TABLE:
            path = f"{place_of(one.name).path.rpartition('.')[0]}.weight"
            sizes[path] = sizes.get(path, 0) + one.num_bytes
    return sizes


def held_bytes(model: nn.Module) -> int:
    """Memory of the weights that a model holds."""
    plain = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    packed = {id(one): one for module in model.modules() for one in vars(module).values()}
    coded = sum(one.num_bytes for one in packed.values() if isinstance(one, PackedWeight))
    tables = [one for one in packed.values() if isinstance(one, StoredTable) and one.place is TablePlace.DEVICE]
    return plain + coded + sum(table.num_bytes for table in tables)
