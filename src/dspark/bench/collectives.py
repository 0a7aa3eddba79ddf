"""What ranks pay for each other: sums and exchanges of a pass's rows, by every way that this machine has."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dspark.bench.device_timing import Call, captured_us
from dspark.config.errors import DSparkError
from dspark.engine.machine import describe_machine
from dspark.engine.ranks.failure import TimeLimits
from dspark.engine.ranks.meeting import RankPlace
from dspark.engine.ranks.opening import root_of
from dspark.engine.ranks.team import Team
from dspark.ops.opset import ops_for
from dspark.ops.parts import sum_parts
from dspark.parallel.group import RankGroup
from dspark.parallel.torch_group import TorchGroup

ROW_COUNTS = (1, 6, 24, 96, 384)
WIDTH, VOCAB = 4096, 129280
_CHAIN = 40  # calls of a captured chain; in a chain no rank waits for a host
_HOST_REPEATS = 5


@dataclass(frozen=True)
class CollectiveRow:
    """One operation.

    Attributes:
        operation: "sum" of bf16 rows [T, width], or "gather" of float32 columns [T, vocabulary / ranks].
        way: "direct" into the other devices' memory where that exists, or the process group's backend.
        num_bytes: of one rank's tensor. us: microseconds of a call; the slowest rank's.
        is_exact: the result has the bits of the ranks' values added or laid side by side in the order of ranks.
    """

    operation: str
    way: str
    num_rows: int
    num_bytes: int
    us: float
    is_exact: bool


@dataclass(frozen=True)
class CollectiveReport:
    """All rows; `remark` says why a way is missing."""

    machine: dict[str, Any]
    num_ranks: int
    remark: str
    rows: tuple[CollectiveRow, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        rows = [vars(row) for row in self.rows]
        return {"schema": "dspark.bench.collectives/1", **vars(self), "rows": rows}


def run_collective_bench(
    num_ranks: int, row_counts: Sequence[int] = ROW_COUNTS, device_type: str = "cuda"
) -> CollectiveReport:
    """Start the ranks and measure.

    Args:
        num_ranks: processes, each with a device of its own where these are accelerators.
        row_counts: rows of a call.
    Raises:
        DSparkError: there are not so many devices.
        RankError: a rank did not come, or has failed.
    """
    if device_type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise DSparkError(f"{num_ranks} ranks need as many accelerators and {torch.cuda.device_count()} are visible")
    team = Team(num_ranks, device_type, TimeLimits())
    try:
        found: list[list[CollectiveRow]] = root_of(team).ask(_measure_rank, tuple(row_counts))
    finally:
        team.close()
    rows = [
        replace(same[0], us=max(one.us for one in same), is_exact=all(one.is_exact for one in same))
        for same in zip(*found, strict=True)
    ]
    machine = describe_machine(torch.device(device_type))
    return CollectiveReport(machine, num_ranks, team.place.remark, tuple(rows))


def _measure_rank(own: RankPlace, row_counts: tuple[int, ...]) -> list[CollectiveRow]:
    """What one rank measures; every rank makes the same calls."""
    far = TorchGroup(ops_for(own.device))
    ways: dict[str, RankGroup] = {"nccl" if own.device.type == "cuda" else "gloo": far}
    if not isinstance(own.group, TorchGroup):
        ways = {"direct": own.group, **ways}
    return [
        _measure(operation, way, group, count, own.device)
        for operation in ("sum", "gather")
        for count in row_counts
        for way, group in ways.items()
    ]


def _measure(operation: str, way: str, group: RankGroup, count: int, device: torch.device) -> CollectiveRow:
    shape, dtype = ((count, WIDTH), torch.bfloat16) if operation == "sum" else ((count, VOCAB // group.size), None)
    parts = [_random(rank, shape).to(dtype or torch.float32) for rank in range(group.size)]
    wanted = sum_parts(torch.stack(parts)) if operation == "sum" else torch.cat(parts, dim=1)
    own = parts[group.rank].to(device)
    call = partial(group.sum if operation == "sum" else group.gather_columns, own)
    is_exact = torch.equal(call().cpu(), wanted)
    us = captured_us([call] * _CHAIN) if device.type == "cuda" else _host_us(call)
    return CollectiveRow(operation, way, count, own.nbytes, us, is_exact)


def _random(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def _host_us(call: Call) -> float:
    times = []
    for _ in range(_HOST_REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times) * 1e6
