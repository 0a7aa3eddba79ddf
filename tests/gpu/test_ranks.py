"""Two accelerators that share a model: sums in rank order by either way, and one model over all ranks and batches."""

from pathlib import Path

import pytest
import torch

from dspark.engine.device import ops_for
from dspark.ops.parts import sum_parts
from dspark.parallel.opening import open_group
from dspark.parallel.torch_group import TorchGroup
from support.divisible_models import write_divisible_checkpoint
from support.rank_processes import run_ranks
from support.rank_rows import rank_rows, require_one_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators"),
]
SIZE = 2
SHAPES = [(1, 4096), (6, 4096), (24, 4096), (96, 4096), (5, 7), (3, 130), (1, 1), (384, 4096), (2, 64640), (7, 5120)]


def part_of(rank: int, seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return values.to(dtype)


def sums(far: TorchGroup) -> int:
    """Differing sums and exchanges, of eager calls and of a graph that is launched an odd number of times."""
    device = torch.device("cuda", far.rank)
    direct, remark = open_group(ops_for(device), device)
    assert remark == "" and not isinstance(direct, TorchGroup), remark
    differing = 0
    for seed, shape in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            parts = [part_of(rank, seed, dtype, shape) for rank in range(SIZE)]
            own, wanted = parts[far.rank].to(device), sum_parts(torch.stack(parts)).to(device)
            wide = torch.cat(parts, dim=1).to(device)
            for group in (direct, far):
                for _ in range(3):
                    differing += not torch.equal(group.sum(own), wanted)
                    differing += not torch.equal(group.gather_columns(own), wide)
                    differing += not torch.equal(group.broadcast(own, 1), parts[1].to(device))
    return differing + captured_sums(direct, device) + captured_sums(far, device)


def captured_sums(group, device: torch.device) -> int:
    """Differing results of a chain of sums and exchanges whose inputs change between launches."""
    x = torch.zeros(6, 4096, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        group.gather_columns(group.sum(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total = group.sum(x)
        wide = group.gather_columns(total[:, : 512 * (1 + group.rank) : 1 + group.rank].contiguous())
        last = group.sum(wide[:1])
    differing = 0
    for seed in range(300):
        parts = [part_of(rank, seed % 7, torch.bfloat16, (6, 4096)) for rank in range(SIZE)]
        x.copy_(parts[group.rank])
        graph.replay()
        wanted = sum_parts(torch.stack(parts)).to(device)
        columns = torch.cat([wanted[:, : 512 * (1 + rank) : 1 + rank] for rank in range(SIZE)], dim=1)
        differing += not (torch.equal(total, wanted) and torch.equal(wide, columns))
        differing += not torch.equal(last, sum_parts(torch.stack([columns[:1]] * SIZE)))
        if seed % 3 == 0:  # an eager call between two launches goes on with the count
            differing += not torch.equal(group.sum(x), wanted)
    return differing


def test_sums_in_rank_order(tmp_path):
    assert run_ranks(tmp_path, SIZE, sums, device_type="cuda") == [0, 0]


def direct_rows(far: TorchGroup, folder: Path) -> dict:
    device = torch.device("cuda", far.rank)
    group, _ = open_group(ops_for(device), device)
    return rank_rows(group, folder, device, torch.bfloat16)


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_one_model_over_ranks_and_batches(tmp_path, family):
    folder = write_divisible_checkpoint(tmp_path / "model", family, quantised=True)
    (tmp_path / "ranks").mkdir()
    require_one_model(run_ranks(tmp_path / "ranks", SIZE, direct_rows, folder, device_type="cuda"))
