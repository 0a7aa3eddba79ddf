"""Memory that a benchmark of a whole model needs, checked before anything is made."""

from dataclasses import dataclass, replace

from dspark.bench.geometry import Geometry, cut_engram
from dspark.config import Config
from dspark.config.errors import DSparkError
from dspark.engine.device import Placement
from dspark.engine.device_memory import HostMemory, memory_of
from dspark.engine.memory import gib
from dspark.engine.sizing import rank_weights, sizes_of
from dspark.layers.plans import Storage
from dspark.models.facts import model_facts
from dspark.ops.table import TABLE_GROUP, TablePlace
from dspark.state.geometry import state_geometry

# What the largest passes work in, before anybody can measure it.
_WORKSPACES = 8 * 2**30


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the weights and of one request's state, and what is available for both."""

    weights: int
    request: int
    available: int


def check_memory(geometry: Geometry, config: Config, placement: Placement) -> MemoryNeed:
    """What a model and its requests take.

    Raises:
        DSparkError: they do not fit; the message says what does.
    """
    need = MemoryNeed(
        rank_weights(geometry.plan, config, placement.ops),
        request_bytes(geometry, config),
        memory_of(placement.device, config).room().for_each(config.tensor_parallel_size, placement.device).spendable,
    )
    needed = need.weights + config.max_num_seqs * need.request
    if needed > need.available:
        num_layers = len(geometry.plan.layers)
        fitting = int(num_layers * max(need.available - config.max_num_seqs * need.request, 0) / need.weights)
        remedy = f"lower --layers to about {fitting}, or " if fitting else ""
        parts = f"{gib(need.weights)} of weights, {gib(need.request)} for each of {config.max_num_seqs} requests"
        raise DSparkError(
            f"{geometry.name} with {num_layers} layers needs {gib(needed)} ({parts}) and {gib(need.available)} are "
            f"free beside a margin: {remedy}lower --requests, --context or --engram-rows"
        )
    return need


def fit_engram(geometry: Geometry, config: Config, placement: Placement) -> Geometry:
    """A geometry whose Engram tables are as large as memory holds beside everything else.

    Raises:
        DSparkError: it holds hardly any.
    """
    tables = [layer.engram for layer in geometry.plan.layers if layer.engram is not None]
    if not tables:
        return geometry
    place = TablePlace(config.engram_tables)
    if place is TablePlace.DEVICE:
        others = rank_weights(geometry.plan, replace(config, engram_tables="pinned"), placement.ops) + _WORKSPACES
        others += config.max_num_seqs * request_bytes(geometry, config)
        left = memory_of(placement.device, config).room().spendable - others
    else:
        left = HostMemory().room().spendable // config.tensor_parallel_size  # each rank has its own
    is_stored = placement.ops.reads_codes or place is not TablePlace.DEVICE
    row = sum(_row_bytes(table.head_dim, geometry.plan.quant.engram if is_stored else None) for table in tables)
    return cut_engram(geometry, max(left, 0) // row)


def _row_bytes(width: int, storage: Storage | None) -> int:
    """Bytes of a table's row: codes and scales, bf16, or float32 where nothing is held as it is stored."""
    if storage is None:
        return 4 * width
    return width + -(-width // TABLE_GROUP) if storage is Storage.FP8_ROW else 2 * width


def request_bytes(geometry: Geometry, config: Config) -> int:
    """State of one request at the full length of a configuration."""
    assert config.max_model_len is not None
    sizes = sizes_of(geometry.plan, config, config.draft_width(model_facts(geometry.plan)))
    return request_pages(geometry, config.max_model_len) * sizes.page_bytes + sizes.slot_bytes


def request_pages(geometry: Geometry, max_len: int) -> int:
    """Pages for one request of so many tokens, with those that admission keeps free for it to grow into."""
    return -(-max_len // state_geometry(geometry.plan).page_tokens) + 2
