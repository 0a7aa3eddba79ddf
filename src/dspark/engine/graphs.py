"""Passes captured as graphs: which shapes there are, one graph a shape, one launch a pass.

A graph holds addresses of weights, stores and input buffers, and nothing of a request: which rows a pass writes and
reads is what the buffers say when it is launched. Shapes are captured when they are first used; the plain run before a
capture compiles the kernels and computes the same rows, which a launch then writes once more.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dspark.config import Config, CUDAGraphMode
from dspark.engine.device import graph_mode

Result = TypeVar("Result")

DEFAULT_ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LEAST_CAPACITY = 512


@dataclass(frozen=True)
class GraphPlan:
    """What is captured.

    Attributes:
        row_counts: rows of a pass over short spans that is one graph, ascending; a pass takes the next larger one.
            Without any, no pass is captured whole.
        max_len: positions of a request at most.
        is_captured: false runs the passes of fixed shape one kernel after the other, as a host without graphs does.
        piece_counts: the same for passes of any spans that are launched in pieces (`dspark.engine.piecewise`). What
            neither has room for runs op by op.
        runs_ahead: rounds of requests that all decode stay on the device, see `dspark.engine.run_ahead`.
    """

    row_counts: tuple[int, ...]
    max_len: int
    is_captured: bool = True
    runs_ahead: bool = True
    piece_counts: tuple[int, ...] = ()

    def rows_for(self, num_rows: int) -> int | None:
        """Rows of the graph for a pass of so many; None where there is none."""
        return next((count for count in self.row_counts if count >= num_rows), None)

    def pieces_for(self, num_rows: int) -> int | None:
        """Rows of the pieces for a pass of so many; None where there are none."""
        return next((count for count in self.piece_counts if count >= num_rows), None)

    def capacity_for(self, length: int) -> int:
        """Positions of the graph for requests of up to `length`: a power of two, or the longest request."""
        capacity = _LEAST_CAPACITY
        while capacity < length:
            capacity *= 2
        return capacity

    def max_pages(self, page_tokens: int) -> int:
        """Pages of so many tokens that a graph can see of a request at most."""
        return -(-self.capacity_for(self.max_len) // page_tokens)

    @property
    def num_capacities(self) -> int:
        """How many capacities there are."""
        return (self.capacity_for(self.max_len) // _LEAST_CAPACITY).bit_length()


def plan_graphs(config: Config, device: torch.device, max_query_len: int, max_len: int) -> GraphPlan | None:
    """The graphs of an admitted configuration; None where steps run eagerly."""
    mode, sizes = graph_mode(config, device), config.compilation_config.cudagraph_capture_sizes
    if mode is CUDAGraphMode.NONE:
        return None
    row_counts: tuple[int, ...] = ()
    if mode.captures_passes:
        row_counts = _needed(sizes or DEFAULT_ROW_COUNTS, config.max_num_seqs * max_query_len)
    piece_counts: tuple[int, ...] = ()
    if mode.captures_pieces:
        most = min(config.max_num_batched_tokens, config.max_num_seqs * max_len)
        piece_counts = _needed(sizes or (*DEFAULT_ROW_COUNTS, *range(1024, most + 512, 512)), most)
    return GraphPlan(row_counts, max_len, runs_ahead=bool(row_counts), piece_counts=piece_counts)


def _needed(counts: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The counts of use where no pass has more rows than `most`: up to the first that holds them all."""
    return counts[: sum(count < most for count in counts) + 1]


class GraphCache(Generic[Result]):
    """Graphs by shape. They share their memory: a result is good until the next launch of any."""

    def __init__(self, is_captured: bool) -> None:
        self._pool = torch.cuda.graph_pool_handle() if is_captured else None
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Result]] = {}

    def launch(self, shape: Hashable, body: Callable[[], Result], moved: Sequence[Tensor] = ()) -> Result:
        """Run `body`, whose launches depend on `shape` and static tensors only.

        Args:
            moved: tensors that the body moves on; the plain run before a capture must not move them twice.
        """
        if self._pool is None:
            return body()
        if shape not in self._graphs:
            before = [tensor.clone() for tensor in moved]
            body()
            for tensor, kept in zip(moved, before, strict=True):
                tensor.copy_(kept)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Threads of a process group, and of other engines, go on meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = body()
            self._graphs[shape] = graph, result
        graph, result = self._graphs[shape]
        graph.replay()
        return result


class StaticRows:
    """Integer inputs of captured passes: columns [rows, columns] on the device, filled in one copy a pass.

    The host's copy is written again only after a pass has been waited for, which every round does when it reads its
    tokens.
    """

    def __init__(self, max_rows: int, num_columns: int, device: torch.device) -> None:
        self._host = torch.zeros(max_rows * num_columns, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(max_rows * num_columns, dtype=torch.int64, device=device)
        self._num_columns = num_columns

    def view(self, num_rows: int) -> Tensor:
        """The device tensor [columns, rows] of a shape."""
        return self._device[: num_rows * self._num_columns].view(self._num_columns, num_rows)

    def fill(self, num_rows: int, columns: Sequence[Sequence[int]], padding: Sequence[int]) -> None:
        """Set each column of a shape: given values, then its padding."""
        host = self._host[: num_rows * self._num_columns].view(self._num_columns, num_rows)
        filled = [[*column, *[pad] * (num_rows - len(column))] for column, pad in zip(columns, padding, strict=True)]
        host.copy_(torch.tensor(filled, dtype=torch.int64))
        self._device[: host.numel()].copy_(self._host[: host.numel()], non_blocking=True)
