"""A model divided by ranks: near the whole model in values, one model to the bit on all ranks and over all batches."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.bench.dummy_weights import dummy_model
from dspark.config.errors import ConfigError
from dspark.models.build import Model, load_model, read_plan
from dspark.models.model_bytes import held_bytes, planned_bytes
from dspark.models.registry import parse_config
from dspark.models.sharding import shard_plan
from dspark.ops.opset import TORCH_OPS
from dspark.parallel.group import RankGroup
from dspark.parallel.shard import Shard
from support.divisible_models import divisible_config, write_divisible_checkpoint
from support.rank_processes import run_ranks
from support.row_reference import draft_blocks, keep_rows, same, write_rows
from support.tiny_models import NUM_VALID, tiny_state

# Family, whether weights are coded, ranks: each family both ways, each way at two and at four ranks.
CASES = [("v41", False, 4), ("v41", True, 2), ("v4", False, 2), ("v4", True, 4)]
LENGTHS = (10, 1, 5)
# Float32 sums in another order, multiplied by what a rounding of an activation to fp8 makes of a difference.
TOLERANCES = {False: 2e-3, True: 0.25}

Rows = dict[str, Tensor]


def tokens_of(place: int) -> list[int]:
    count = LENGTHS[place]
    return torch.randint(2, NUM_VALID, (count,), generator=torch.Generator().manual_seed(place)).tolist()


@torch.inference_mode()
def rows_of(model: Model, chunk: int, order: tuple[int, ...]) -> Rows:
    """Logits, features, draft and its bias of some requests, written side by side in this order, `chunk` rows each."""
    state = tiny_state(model, max_query_len=max(LENGTHS))
    requests = {place: state.open() for place in order}
    rows: dict[str, list[Tensor]] = {f"{name} {place}": [] for name in ("logits", "hidden") for place in order}
    for start in range(0, max(LENGTHS[place] for place in order), chunk):
        running = [place for place in order if LENGTHS[place] > start]
        spans = [(requests[place], tokens_of(place)[: start + chunk]) for place in running]
        counts = [len(tokens) - start for _, tokens in spans]
        logits, hidden = write_rows(model, state, spans)
        for place, own, features in zip(running, logits.split(counts), hidden.split(counts), strict=True):
            rows[f"logits {place}"].append(own)
            rows[f"hidden {place}"].append(features)
            keep_rows(model, state, requests[place], features)
    drafts = draft_blocks(model, state, list(requests.values()), [tokens_of(place)[-1] for place in order])
    base = model.target.logits(drafts.normed).chunk(len(order))
    found = {name: torch.cat(parts) for name, parts in rows.items()}
    return found | {f"draft {place}": own for place, own in zip(order, base, strict=True)}


def work(group: RankGroup, folder: Path) -> dict[str, Rows]:
    """Rows of a model divided by inner widths and by whole experts, in several batches."""
    found = {}
    for name, whole_experts in (("parts", False), ("whole experts", True)):
        model = load_model(folder, ranks=group, whole_experts=whole_experts)
        found[name] = rows_of(model, 10, (0, 1, 2))
        found[f"{name}, in another order"] = rows_of(model, 10, (2, 0, 1))
        found[f"{name}, row by row"] = rows_of(model, 1, (1, 2, 0))
        alone = [rows_of(model, 4, (place,)) for place in range(len(LENGTHS))]
        found[f"{name}, each alone"] = alone[0] | alone[1] | alone[2]
        found[f"{name}, held"] = {"share": torch.tensor([float(sum(x.numel() for x in model.parameters()))])}
    return found


@pytest.mark.parametrize(("family", "quantised", "size"), CASES)
def test_ranks_compute_one_model(tmp_path, family, quantised, size):
    folder = write_divisible_checkpoint(tmp_path / "model", family, quantised)
    whole = load_model(folder)
    expected = rows_of(whole, 10, (0, 1, 2))
    (tmp_path / "ranks").mkdir()
    ranks = run_ranks(tmp_path / "ranks", size, work, folder)
    for found in ranks[1:]:
        for batch, rows in found.items():
            assert all(same(rows[name], ranks[0][batch][name]) for name in rows), f"ranks differ, {batch}"
    found = ranks[0]
    for way in ("parts", "whole experts"):
        for batch in ("in another order", "row by row", "each alone"):
            rows = found[f"{way}, {batch}"]
            assert all(same(rows[name], found[way][name]) for name in expected), f"{way}, {batch}"
        for name, values in expected.items():
            error = (found[way][name] - values).norm() / values.norm()
            assert error < TOLERANCES[quantised], f"{way}, {name}: {error}"
        assert found[f"{way}, held"]["share"] < 0.75 * sum(x.numel() for x in whole.parameters())


def test_a_rank_holds_its_slices(tmp_path):
    """Every divided weight of the whole model is what its ranks hold, put together; all others are whole."""
    folder = write_divisible_checkpoint(tmp_path / "model", "v41", quantised=True)
    whole = dict(load_model(folder).named_parameters())
    ranks = [dict(load_rank(folder, Shard(rank, 2)).named_parameters()) for rank in range(2)]
    for name, values in whole.items():
        parts = [rank[name] for rank in ranks]
        if parts[0].shape == values.shape:
            assert all(torch.equal(part, values) for part in parts), name
        elif "w13" in name:
            halves = [part.chunk(2, dim=-2) for part in parts]
            assert torch.equal(torch.cat([half[i] for i in (0, 1) for half in halves], dim=-2), values), name
        else:
            dim = next(dim for dim, size in enumerate(values.shape) if size != parts[0].shape[dim])
            assert torch.equal(torch.cat(parts, dim=dim), values), name
    held = [dict(load_rank(folder, Shard(rank, 2, whole_experts=True)).named_parameters()) for rank in range(2)]
    stack = "target.layers.0.ffn.experts.w2"
    assert torch.equal(torch.cat([rank[stack] for rank in held]), whole[stack])


class Unconnected:
    """A rank of a group that never meets: enough to load with."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    sum = gather_columns = broadcast = None


def load_rank(folder: Path, shard: Shard) -> Model:
    return load_model(folder, ranks=Unconnected(shard.rank, shard.size), whole_experts=shard.whole_experts)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_random_weights_are_divided_too(whole_experts):
    """Each rank makes other numbers where the ranks divide a weight, and the same where each holds it whole."""
    plan, device = parse_config(divisible_config("v4", quantised=True)), torch.device("cpu")
    ranks = [dummy_model(plan, TORCH_OPS, torch.float32, device, Unconnected(r, 2), whole_experts) for r in (0, 1)]
    whole = dict(dummy_model(plan, TORCH_OPS, torch.float32, device).named_parameters())
    own, other = (dict(rank.named_parameters()) for rank in ranks)
    for name, values in own.items():
        divided = values.shape != whole[name].shape
        assert torch.equal(values, other[name]) != (divided and values.dim() > 1), name
        assert divided == any(part in name for part in ("attn.wq_b", "wo_", "sink", "experts.", "target.head")), name
    assert planned_bytes(ranks[0].plan, TORCH_OPS) == pytest.approx(held_bytes(ranks[0]), rel=0.02)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_what_cannot_be_divided_is_refused(tmp_path, whole_experts):
    plan = read_plan(write_divisible_checkpoint(tmp_path / "model", "v4", quantised=True))
    assert shard_plan(plan, Shard()) is plan
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 8 does not divide this model: .*use 1 or 2 or 4"):
        shard_plan(plan, Shard(0, 8, whole_experts))
