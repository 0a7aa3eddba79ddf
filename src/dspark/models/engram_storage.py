"""Engram tables as they are stored: on the device, in pinned memory of the host, or mapped from their file."""

import weakref

import torch
from torch import Tensor

from dspark.checkpoint.folder import TensorSource
from dspark.checkpoint.formats import TABLE_BLOCK
from dspark.checkpoint.plan import TensorPlan
from dspark.config.errors import CheckpointError, ConfigError
from dspark.layers.engram import EngramTable
from dspark.ops.table import StoredTable, TablePlace

_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister: for every context, at an address that kernels read


def fill_table(
    module: EngramTable, source: TensorSource, plan: TensorPlan, place: TablePlace, device: torch.device | str
) -> None:
    """Put a stored table in place of the parameter.

    Raises:
        CheckpointError: it is stored in a form that no row can be read of alone.
    """
    if plan.scale is not None and plan.block != TABLE_BLOCK:
        raise CheckpointError(f"the table {plan.name} has scales of {plan.block}, and its rows are read one by one")
    read = source.mapped if place is TablePlace.MAPPED else source.read
    values = _as_stored(read(plan.name))
    scales = None if plan.scale is None else read(plan.scale).view(torch.uint8)
    set_table(module, StoredTable(values, scales, place), device)


def set_table(module: EngramTable, table: StoredTable, device: torch.device | str) -> None:
    """Let a module look rows up in a table of the host or, once it is there, of the device."""
    if table.place is TablePlace.PINNED:
        for part in (table.values, table.scales):
            if part is not None:
                _pin(part)
    module._parameters.pop("weight", None)
    module.weight = table.to(device)  # type: ignore[assignment]


def _as_stored(values: Tensor) -> Tensor:
    """Codes as bytes; values as they are."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


def _pin(values: Tensor) -> None:
    """Let kernels read a tensor of the host where it lies; the allocator for pinned memory would round its size up."""
    pointer, runtime = values.data_ptr(), torch.cuda.cudart()
    fault = int(runtime.cudaHostRegister(pointer, values.nbytes, _PORTABLE | _MAPPED))
    if fault:
        raise ConfigError(
            f"the host does not pin {values.nbytes / 2**30:.1f} GiB of an Engram table (error {fault}): use "
            'engram_tables="device", or raise the limit of locked memory'
        )
    weakref.finalize(values, runtime.cudaHostUnregister, pointer)
