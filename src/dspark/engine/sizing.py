"""Sizes of an engine over a loaded model: what its state takes, what its passes take, and the pages that are left."""

import gc
from dataclasses import dataclass, replace
from functools import partial

import torch

from dspark.config import Config
from dspark.config.errors import ConfigError
from dspark.engine.core import Engine
from dspark.engine.device import TORCH_DTYPES
from dspark.engine.device_memory import DeviceMemory, Room
from dspark.engine.graphs import GraphPlan, plan_graphs
from dspark.engine.memory import MemoryPlan, plan_memory, require_weights_fit
from dspark.engine.ranks.engine import RankedEngine
from dspark.engine.ranks.part import PartPlan, make_part
from dspark.engine.ranks.share import Share
from dspark.engine.rehearsal import rehearse, rehearsed_len
from dspark.engine.speculation import Speculation
from dspark.engine.tokenizer import TextTokenizer
from dspark.layers.plans import ModelPlan
from dspark.models.build import Model
from dspark.models.model_bytes import held_bytes, planned_bytes
from dspark.models.sharding import shard_plan
from dspark.ops.opset import OpSet
from dspark.ops.table import TablePlace
from dspark.parallel.shard import Shard
from dspark.state.geometry import StateSizes, rewind_rows, rows_ahead, state_geometry, state_sizes
from dspark.state.model_state import ModelState

# Every value of an index key fits bf16 exactly, so keys are held in it whatever the other rows are.
INDEX_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of, less the size of its state. share: of the model, where several ranks hold it."""

    model: Model
    tokenizer: TextTokenizer
    config: Config
    speculation: Speculation
    max_model_len: int
    device: torch.device
    share: Share[Model] | None = None

    def engine(self, num_pages: int, graphs: GraphPlan | None = None) -> Engine:
        """The engine over a fresh state; its graphs are those of the configuration, or others."""
        plan = self.part(num_pages, graphs or self.graphs())
        if self.share is None:
            state = plan.state(self.model, ModelState, self.device)
            return Engine(self.model, state, self.tokenizer, self.speculation, plan.graphs)
        share = self.share.derive(make_part, plan)
        return RankedEngine(share, self.model, share.own.state, self.tokenizer, self.speculation, plan.graphs)

    def part(self, num_pages: int, graphs: GraphPlan | None) -> PartPlan:
        """What each rank holds of it, with a state of so many pages."""
        config, speculation = self.config, self.speculation
        reuses = config.enable_prefix_caching
        return PartPlan(
            num_slots=config.max_num_seqs,
            num_pages=num_pages,
            max_query_len=1 + speculation.num_speculative_tokens,
            dtype=TORCH_DTYPES[config.kv_cache_dtype],
            index_dtype=INDEX_DTYPE,
            max_rewind=rewind_rows(state_geometry(self.model.plan), reuses_prefixes=reuses),
            max_ahead=rows_ahead(1 + speculation.num_speculative_tokens),
            graphs=graphs,
            draft_width=0 if speculation.proposer else speculation.num_speculative_tokens,
            num_valid_tokens=min(self.model.plan.vocab_size, self.tokenizer.vocab_size),
        )

    def graphs(self) -> GraphPlan | None:
        """What is captured."""
        width = 1 + self.speculation.num_speculative_tokens
        return plan_graphs(self.config, self.device, width, self.max_model_len)


def sizes_of(plan: ModelPlan, config: Config, width: int) -> StateSizes:
    """Memory of the state of an engine that drafts `width` tokens a round."""
    geometry = state_geometry(plan)
    rewind = rewind_rows(geometry, reuses_prefixes=config.enable_prefix_caching)
    value_bytes = TORCH_DTYPES[config.kv_cache_dtype].itemsize
    return state_sizes(geometry, 1 + width, rewind, value_bytes, INDEX_DTYPE.itemsize)


def rank_weights(plan: ModelPlan, config: Config, ops: OpSet) -> int:
    """Bytes of the weights that one rank holds, before they are read.

    Args:
        plan: of the whole model, as it is loaded.
    Raises:
        ConfigError: the model cannot be divided by so many ranks.
    """
    part = shard_plan(plan, Shard(0, config.tensor_parallel_size, config.enable_expert_parallel))
    return planned_bytes(part, ops, TablePlace(config.engram_tables))


def size_engine(parts: EngineParts, memory: DeviceMemory) -> MemoryPlan:
    """The pages of an engine, and who holds the rest of the memory.

    Where memory can be measured and nobody says how many pages there are, the largest passes are run once to see what
    they take.

    Raises:
        ConfigError: no request of full length fits; the message says what would.
    """
    config = parts.config
    share_out = partial(
        plan_memory,
        config,
        sizes_of(parts.model.plan, config, parts.speculation.num_speculative_tokens),
        memory.room(),
        weights=held_bytes(parts.model),
        max_len=parts.max_model_len,
    )
    plan = share_out(workspaces=0, is_measured=False)
    if not memory.measures or config.max_num_pages is not None:
        return plan
    return share_out(workspaces=measure_passes(parts, memory), is_measured=True)


def foreseen(plan: ModelPlan, config: Config, width: int, max_len: int, room: Room, weights: int) -> MemoryPlan:
    """The same before weights are read; what passes take is not measured then.

    Args:
        plan: as it is loaded. width: draft tokens a round. weights: bytes, see `rank_weights`.
    Raises:
        ConfigError: it does not fit; the message says why.
    """
    require_weights_fit(room, weights)
    left = replace(room, free=room.free - weights)
    sizes = sizes_of(plan, config, width)
    return plan_memory(config, sizes, left, weights=weights, max_len=max_len, workspaces=0, is_measured=False)


def measure_passes(parts: EngineParts, memory: DeviceMemory) -> int:
    """Bytes that the largest passes work in, and all graphs. Raises ConfigError where they do not fit at all."""
    config, graphs = parts.config, parts.graphs()
    num_rows, max_len = config.max_num_batched_tokens, parts.max_model_len
    if graphs is not None:
        graphs = replace(graphs, max_len=rehearsed_len(1 + parts.speculation.num_speculative_tokens, max_len))
    try:
        engine = parts.engine(num_pages=1, graphs=graphs)
        taken = memory.need_of(partial(rehearse, engine, config.max_num_seqs, num_rows, max_len))
        del engine
        gc.collect()  # an engine of several ranks refers to itself, and the next one needs the room
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a pass of {num_rows} rows at position {max_len} does not fit beside the weights: lower "
            "max_num_batched_tokens or max_model_len"
        ) from error
    return taken + _further_results(parts)


def _further_results(parts: EngineParts) -> int:
    """Results of the graphs that are captured later: they share what passes work in, and each keeps its own rows."""
    graphs, plan = parts.graphs(), parts.model.plan
    if graphs is None:
        return 0
    features = len(plan.draft.target_layer_ids) * plan.hidden_size if plan.draft else 0
    return graphs.num_capacities * sum(graphs.row_counts) * 4 * (plan.vocab_size + features)
