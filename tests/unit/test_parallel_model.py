"""A model divided by ranks: near the whole model in values, one model to the bit on all ranks and over all batches."""

from pathlib import Path

import pytest
import torch

from dspark.bench.dummy_weights import dummy_model
from dspark.config.errors import ConfigError
from dspark.models.build import Model, load_model, read_plan
from dspark.models.model_bytes import held_bytes, planned_bytes
from dspark.models.registry import parse_config
from dspark.models.sharding import shard_plan
from dspark.ops.opset import TORCH_OPS
from dspark.parallel.shard import Shard
from support.divisible_models import divisible_config, write_divisible_checkpoint
from support.rank_processes import run_ranks
from support.rank_rows import WAYS, rank_rows, require_one_model, rows_of

# Family, whether weights are coded, ranks: each family both ways, each way at two and at four ranks.
CASES = [("v41", False, 4), ("v41", True, 2), ("v4", False, 2), ("v4", True, 4)]
# Float32 sums in another order, multiplied by what a rounding of an activation to fp8 makes of a difference.
TOLERANCES = {False: 2e-3, True: 0.25}


@pytest.mark.parametrize(("family", "quantised", "size"), CASES)
def test_ranks_compute_one_model(tmp_path, family, quantised, size):
    folder = write_divisible_checkpoint(tmp_path / "model", family, quantised)
    whole = load_model(folder)
    expected = rows_of(whole, 10, (0, 1, 2))
    (tmp_path / "ranks").mkdir()
    ranks = run_ranks(tmp_path / "ranks", size, rank_rows, folder, torch.device("cpu"), torch.float32)
    require_one_model(ranks)
    found = ranks[0]
    for way in WAYS:
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


def load_rank(folder: Path, shard: Shard, **options) -> Model:
    return load_model(folder, ranks=Unconnected(shard.rank, shard.size), whole_experts=shard.whole_experts, **options)


def test_what_is_read_is_counted(tmp_path):
    """A rank reads its own part, and is told how much of that there is."""
    folder = write_divisible_checkpoint(tmp_path / "model", "v41", quantised=True)
    totals = []
    for shard in (Shard(), Shard(1, 2)):
        seen = []
        load_rank(folder, shard, on_read=lambda *counts, seen=seen: seen.append(counts))
        done, (total, *others) = [one for one, _ in seen], {total for _, total in seen}
        assert done == sorted(done) and done[-1] == total and not others
        totals.append(total)
    assert 0.5 < totals[1] / totals[0] < 0.75


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
