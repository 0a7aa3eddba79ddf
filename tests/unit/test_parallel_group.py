"""Groups of ranks: sums in rank order rounded once, the same bits on every rank, whatever travels beside an element."""

import pytest
import torch

from dspark.ops.opset import TORCH_OPS
from dspark.parallel.group import ALONE, RankGroup
from dspark.parallel.opening import open_group
from dspark.parallel.shard import WHOLE, Shard
from dspark.parallel.torch_group import DIVIDED_FROM, TorchGroup
from support.rank_processes import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part_of_rank(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of very different sizes, whose float32 sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(*shape, generator=generator) * torch.exp(3 * torch.randn(*shape, generator=generator))
    return values.to(dtype)


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def exchange(group: RankGroup) -> dict[str, torch.Tensor]:
    opened, remark = open_group(TORCH_OPS, torch.device("cpu"))
    assert isinstance(opened, TorchGroup) and remark == ""
    found = {}
    for dtype in DTYPES:
        whole = part_of_rank(group.rank, dtype, 33, 40)
        found[f"sum {dtype}"] = group.sum(whole)
        found[f"sum of some {dtype}"] = torch.cat([group.sum(rows) for rows in whole.split([1, 7, 25])])
        found[f"gather {dtype}"] = group.gather_columns(whole[:5, ::2])
    found["large"] = group.sum(part_of_rank(group.rank, torch.bfloat16, 3, DIVIDED_FROM // 2 + 1))
    found["none"] = group.sum(torch.empty(0, 8))
    found["broadcast"] = group.broadcast(torch.arange(6) + 100 * group.rank, source=1)
    found["broadcast of flags"] = group.broadcast(torch.tensor([group.rank == 0, group.rank == 1]))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_exchanges_of_several_ranks(tmp_path, size):
    ranks = run_ranks(tmp_path, size, exchange)
    for found in ranks[1:]:
        assert all(torch.equal(found[name], ranks[0][name]) for name in ranks[0])
    found = ranks[0]
    for dtype in DTYPES:
        parts = [part_of_rank(rank, dtype, 33, 40) for rank in range(size)]
        assert torch.equal(found[f"sum {dtype}"], in_rank_order(parts))
        assert torch.equal(found[f"sum of some {dtype}"], in_rank_order(parts))
        assert torch.equal(found[f"gather {dtype}"], torch.cat([part[:5, ::2] for part in parts], dim=1))
    if size > 2:
        parts = [part_of_rank(rank, torch.float32, 33, 40) for rank in range(size)]
        assert not torch.equal(in_rank_order(parts), in_rank_order(parts[::-1])), "the order of ranks must show"
    large = [part_of_rank(rank, torch.bfloat16, 3, DIVIDED_FROM // 2 + 1) for rank in range(size)]
    assert torch.equal(found["large"], in_rank_order(large))
    assert found["none"].shape == (0, 8)
    assert torch.equal(found["broadcast"], torch.arange(6) + 100)
    assert found["broadcast of flags"].tolist() == [True, False]


def test_one_rank_changes_nothing():
    x = torch.randn(3, 4)
    assert ALONE.sum(x) is x and ALONE.gather_columns(x) is x and ALONE.broadcast(x) is x
    assert (ALONE.rank, ALONE.size) == (0, 1)


def test_parts_follow_the_order_of_ranks():
    assert [Shard(rank, 4).part(8) for rank in range(4)] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert WHOLE.part(8) == range(8)
