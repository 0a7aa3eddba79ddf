"""From a checkpoint folder to a model in memory: plan, modules, weights, token map."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.checkpoint.counted import CountedSource, OnRead
from dspark.checkpoint.folder import SafetensorsFolder, TensorSource
from dspark.checkpoint.load import match_tensors, stored_values
from dspark.checkpoint.plan import SkippedTensor, TensorPlan
from dspark.config.errors import CheckpointError
from dspark.layers.engram import EngramTable
from dspark.layers.plans import ModelPlan
from dspark.models.decoder import Decoder
from dspark.models.dspark_draft import DsparkDraft
from dspark.models.engram_storage import fill_table
from dspark.models.engram_vocabulary import read_token_map
from dspark.models.inventory import DRAFT_PREFIX, expected_tensors, skip_rules
from dspark.models.names import Place, place_of, unfilled, view_of
from dspark.models.packed_weights import fill_packed, join_maps, packable
from dspark.models.registry import parse_config
from dspark.models.sharding import PartSource, shard_plan, stored_parts
from dspark.ops.opset import TORCH_OPS, OpSet
from dspark.ops.table import TablePlace
from dspark.parallel.group import ALONE, RankGroup
from dspark.parallel.shard import Shard


class Model(nn.Module):
    """A target with its draft, if the checkpoint has one; or one rank's part of both, by a plan of that part."""

    def __init__(
        self,
        plan: ModelPlan,
        ops: OpSet = TORCH_OPS,
        dtype: torch.dtype = torch.float32,
        ranks: RankGroup = ALONE,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.ops_name = ops.name
        self.target = Decoder(plan, ops, dtype, ranks)
        self.draft = DsparkDraft(plan, ops, ranks) if plan.draft else None
        self.skipped: tuple[SkippedTensor, ...] = ()


def read_plan(folder: Path) -> ModelPlan:
    """The plan of a checkpoint folder, from config.json alone."""
    return parse_config(read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises CheckpointError when it is absent or no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: give the folder of a checkpoint in the official layout")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): fetch it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return config


def load_model(
    folder: Path,
    ops: OpSet = TORCH_OPS,
    dtype: torch.dtype = torch.float32,
    with_draft: bool = True,
    draft_folder: Path | None = None,
    device: torch.device | str = "cpu",
    ranks: RankGroup = ALONE,
    whole_experts: bool = False,
    engram_tables: TablePlace = TablePlace.DEVICE,
    on_read: OnRead = lambda done, total: None,
) -> Model:
    """Read a whole checkpoint, or one rank's part of it.

    Args:
        folder: checkpoint in the official layout.
        ops: twins that the modules use.
        dtype: of activations and cached rows; weights are held as float32 values, or as `ops` reads them from disk.
        with_draft: also read the draft stages, where there are any.
        draft_folder: take them from this checkpoint of the same release; only with `with_draft`.
        device: where the weights go once they are read.
        ranks: that share the model; this one reads and holds its part only.
        whole_experts: a rank holds whole routed experts, not a part of each.
        engram_tables: where they lie.
        on_read: told how many bytes of one folder have been read, after every tensor.
    Raises:
        CheckpointError: anything missing, unexpected, of the wrong shape or type, truncated or corrupt.
        ConfigError: the model cannot be divided by so many ranks.
    """
    whole = read_plan(folder)
    plan = shard_plan(whole, Shard(ranks.rank, ranks.size, whole_experts))
    tensors = expected_tensors(whole, with_draft=with_draft)
    held = {item.name: item for item in expected_tensors(plan, with_draft=with_draft)}
    parts = stored_parts(tensors, held.values(), ranks.rank)
    with SafetensorsFolder(folder) as source:
        match = match_tensors(source.entries, tensors, skip_rules(plan, with_draft=with_draft))
        if not with_draft:
            plan = replace(plan, draft=None)
        model = Model(plan, ops, dtype, ranks)
        own = [held[item.name] for item in match.plans if item.name in held]
        filled = _fill(model, _counted(PartSource(source, parts), own, on_read), own, device, engram_tables)
    if missed := unfilled(model, filled):
        raise CheckpointError(f"the inventory does not fill {', '.join(missed)}")
    if draft_folder is not None:
        with SafetensorsFolder(draft_folder) as source:
            match_tensors(source.entries, tensors, skip_rules(plan))
            draft_plans = [item for item in own if item.memory_class.startswith(DRAFT_PREFIX)]
            _fill(model, _counted(PartSource(source, parts), draft_plans, on_read), draft_plans, device)
    if plan.ngrams is not None:
        model.target.token_map = read_token_map(folder, plan)
    model.skipped = match.skipped
    if ops.reads_codes:
        join_maps(model)
    return model.to(device).eval()


def _counted(source: TensorSource, plans: Sequence[TensorPlan], on_read: OnRead) -> CountedSource:
    return CountedSource(source, sum(plan.num_bytes for plan in plans), on_read)


def _fill(
    model: Model,
    source: TensorSource,
    plans: Sequence[TensorPlan],
    device: torch.device | str,
    engram_tables: TablePlace = TablePlace.DEVICE,
) -> list[Place]:
    """Put every planned tensor in its place, one weight at a time; the places are returned."""
    scales = {plan.scale for plan in plans if plan.scale}
    wanted = [plan for plan in plans if plan.name not in scales]
    packed = packable(wanted, model) if model.target.ops.reads_codes else {}
    for path, parts in packed.items():
        fill_packed(model, path, source, parts, device)
    for plan in wanted:
        place = place_of(plan.name)
        owner = model.get_submodule(place.path.rpartition(".")[0])
        if isinstance(owner, EngramTable) and (model.target.ops.reads_codes or engram_tables is not TablePlace.DEVICE):
            fill_table(owner, source, plan, engram_tables, device)
        elif place.path not in packed:
            view_of(place, model).copy_(stored_values(source, plan))
    return [place_of(plan.name) for plan in wanted]
