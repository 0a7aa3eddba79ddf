"""Bandwidth of the exact products at real shapes, beside the library's own products, whose rows are not exact.

A product of few rows is a read of its weights: the figure is weight bytes over time, as a share of what a large copy
moves a second, and of what a library kernel moves in a launch of the same size. The library's times are of bf16
weights, which are two to four times the bytes, and of results that may change with the number of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.bench.device_timing import Call, captured_us, copy_bandwidth, moving_us
from dspark.bench.kernel_halves import half_cases
from dspark.bench.kernel_shapes import GEOMETRIES, ROW_COUNTS, ExpertShape, Form, Geometry, LinearShape
from dspark.bench.random_weights import member, random_weight, weight_bytes
from dspark.config.errors import DSparkError
from dspark.engine.machine import describe_machine
from dspark.ops.packing import PackedWeight
from dspark.ops.route import Route
from dspark.ops.triton import experts, grouping, linear

_TURN_BYTES = 3e8  # distinct weights that a chain goes through: several times the cache
_MOST_TURNS = 40
_ROUTES = 6
_LIMIT = 10.0


@dataclass(frozen=True)
class KernelRow:
    """One kernel at one row count.

    Attributes:
        num_bytes: weight bytes that must be read. kernel_us: time of a launch (of all launches of a whole mixture).
        moving_us: time in which a library kernel moves as many bytes; None where the bytes change with the route.
        library_us: the library's product in bf16; None where there is none.
        is_exact: the first row's bits are those that it has alone.
    """

    geometry: str
    kernel: str
    form: str
    num_rows: int
    num_bytes: int
    kernel_us: float
    moving_us: float | None
    library_us: float | None
    is_exact: bool

    @property
    def terabytes_per_second(self) -> float:
        """Weight bytes over time."""
        return self.num_bytes / self.kernel_us / 1e6


@dataclass(frozen=True)
class KernelReport:
    """All rows, and the bandwidth of a large copy in bytes a second."""

    machine: dict[str, Any]
    copy_bandwidth: float
    rows: tuple[KernelRow, ...]

    def share(self, row: KernelRow) -> float:
        """Achieved bandwidth over that of a large copy."""
        return row.terabytes_per_second * 1e12 / self.copy_bandwidth

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "schema": "dspark.bench.kernels/1",
            "machine": self.machine,
            "copy_terabytes_per_second": self.copy_bandwidth / 1e12,
            "rows": [
                {**vars(row), "terabytes_per_second": row.terabytes_per_second, "share_of_copy": self.share(row)}
                for row in self.rows
            ],
        }


def run_kernel_bench(
    row_counts: Sequence[int] = ROW_COUNTS,
    geometries: Sequence[Geometry] = GEOMETRIES,
    on_case: Callable[[str], None] = lambda name: None,
) -> KernelReport:
    """Measure every product of every geometry.

    Args:
        row_counts: rows of a call. geometries: whose shapes. on_case: called with the name of what comes next.
    Raises:
        DSparkError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise DSparkError("the kernels are measured on an accelerator and this machine has none that torch can use")
    device = torch.device("cuda")
    torch.set_grad_enabled(False)
    bandwidth = copy_bandwidth(device)
    rows: list[KernelRow] = []
    for geometry in geometries:
        for shape in geometry.linears:
            on_case(f"{geometry.name}: {shape.name}")
            rows += _linear_rows(geometry.name, shape, row_counts, device)
        on_case(f"{geometry.name}: between the products")
        rows += _half_rows(geometry, row_counts, device)
        on_case(f"{geometry.name}: routed experts")
        rows += _expert_rows(geometry.name, geometry.experts, row_counts, device)
    return KernelReport(describe_machine(device), bandwidth, tuple(rows))


def num_cases(geometries: Sequence[Geometry] = GEOMETRIES) -> int:
    """How often `on_case` is called."""
    return sum(len(geometry.linears) + 2 for geometry in geometries)


def _linear_rows(
    geometry: str, shape: LinearShape, row_counts: Sequence[int], device: torch.device
) -> Iterator[KernelRow]:
    one = random_weight(shape.form, 1, shape.N, shape.K, device)
    num_bytes = weight_bytes(one)
    turns = max(2, min(_MOST_TURNS, int(_TURN_BYTES // num_bytes) + 1)) if num_bytes < _TURN_BYTES else 1
    stack = random_weight(shape.form, turns, shape.N, shape.K, device)
    weights = [_single(stack, turn) for turn in range(turns)]
    plain = [torch.randn(shape.N, shape.K, device=device).bfloat16() for _ in range(min(turns, 10))]
    every = torch.randn(max(row_counts), shape.groups * shape.K, device=device).bfloat16()
    out_dtype = torch.float32 if shape.float_out else torch.bfloat16
    alone = linear.linear(every[:1], weights[0], out_dtype, shape.groups)
    moving = moving_us(num_bytes, device)
    for count in row_counts:
        x = every[:count].contiguous()
        calls: list[Call] = [partial(linear.linear, x, w, out_dtype, shape.groups) for w in weights]
        library = None
        if shape.groups == 1:
            library = captured_us([partial(F.linear, x, w) for w in plain])
        yield KernelRow(
            geometry,
            shape.name,
            shape.form,
            count,
            num_bytes,
            captured_us(calls),
            moving,
            library,
            torch.equal(linear.linear(x, weights[0], out_dtype, shape.groups)[:1], alone),
        )


def _single(stack: Tensor | PackedWeight, index: int) -> Tensor | PackedWeight:
    """One weight as `linear` takes it."""
    return stack[index] if isinstance(stack, Tensor) else member(stack, index)


def _half_rows(geometry: Geometry, row_counts: Sequence[int], device: torch.device) -> Iterator[KernelRow]:
    for count in row_counts:
        for case in half_cases(geometry.experts, count, device):
            us = captured_us(case.calls)
            yield KernelRow(geometry.name, case.name, case.form, count, case.num_bytes, us, None, None, case.is_exact)


def _expert_rows(
    geometry: str, shape: ExpertShape, row_counts: Sequence[int], device: torch.device
) -> Iterator[KernelRow]:
    w13 = random_weight(Form.FP4, shape.num_experts, 2 * shape.F, shape.D, device)
    w2 = random_weight(Form.FP4, shape.num_experts, shape.D, shape.F, device)
    shared13 = random_weight(shape.shared, 1, 2 * shape.F, shape.D, device)
    shared2 = random_weight(shape.shared, 1, shape.D, shape.F, device)
    library = _library_products(shape, row_counts, device)
    every = torch.randn(max(row_counts), shape.D, device=device).bfloat16()
    inner = torch.randn(max(row_counts) * shape.topk, shape.F, device=device).bfloat16()
    for count in row_counts:
        x = every[:count].contiguous()
        routes = [_random_route(count, shape, device, seed) for seed in range(_ROUTES)]
        touched = sum(int(route.expert_ids.unique().numel()) for route in routes) / len(routes)
        tiles = [grouping.tiles_of(route, shape.num_experts) for route in routes]
        places = inner[: count * shape.topk]
        first: list[Call] = [partial(experts.expert_product, x, w13, t[0]) for t in tiles]
        second: list[Call] = [partial(experts.expert_product, places, w2, t[1]) for t in tiles]

        def whole(x: Tensor, route: Route) -> Tensor:
            beside = experts.shared_expert(x, (shared13, shared2), _LIMIT, shape.group)
            terms = experts.mixture(x, route, (w13, w2), beside, _LIMIT, shape.group)
            return terms if isinstance(terms, Tensor) else experts.sum_terms(terms)

        both: list[Call] = [partial(whole, x, r) for r in routes]
        head = Route(routes[0].expert_ids[:1], routes[0].weights[:1])
        is_exact = torch.equal(whole(x[:1], head), whole(x, routes[0])[:1])
        sizes = [int(touched * weight_bytes(w) / shape.num_experts) for w in (w13, w2)]
        both_bytes = sum(sizes) + weight_bytes(shared13) + weight_bytes(shared2)
        times = library.get(count, (None, None))
        for name, calls, size, other in (
            ("routed w13", first, sizes[0], times[0]),
            ("routed w2", second, sizes[1], times[1]),
            ("mixture: all launches", both, both_bytes, None),
        ):
            yield KernelRow(geometry, name, Form.FP4, count, size, captured_us(calls), None, other, is_exact)


def _random_route(count: int, shape: ExpertShape, device: torch.device, seed: int) -> Route:
    """Uniform routing: `topk` different experts a row."""
    generator = torch.Generator(device=device).manual_seed(1000 * count + seed)
    scores = torch.rand(count, shape.num_experts, device=device, generator=generator)
    weights = torch.rand(count, shape.topk, device=device, generator=generator)
    return Route(scores.argsort(-1)[:, : shape.topk].contiguous(), weights)


def _library_products(
    shape: ExpertShape, row_counts: Sequence[int], device: torch.device
) -> dict[int, tuple[float | None, float | None]]:
    """Times of the library's grouped bf16 products of rows that are sorted already; empty where it has none."""
    grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        return {}
    times: dict[int, tuple[float | None, float | None]] = dict.fromkeys(row_counts, (None, None))
    for place, (N, K) in enumerate(((2 * shape.F, shape.D), (shape.D, shape.F))):
        weight = torch.empty(shape.num_experts, N, K, dtype=torch.bfloat16, device=device).normal_()
        for count in row_counts:
            rows = torch.randn(count * shape.topk, K, device=device).bfloat16()
            ends = [_group_ends(_random_route(count, shape, device, seed), shape) for seed in range(_ROUTES)]
            calls: list[Call] = [partial(grouped, rows, weight.transpose(1, 2), offs=e) for e in ends]
            pair = list(times[count])
            pair[place] = captured_us(calls)
            times[count] = (pair[0], pair[1])
        del weight
    return times


def _group_ends(route: Route, shape: ExpertShape) -> Tensor:
    """End of each expert's rows, int32, as the library's grouped product takes them."""
    counts = torch.bincount(route.expert_ids.flatten(), minlength=shape.num_experts)
    return counts.cumsum(0).to(torch.int32)
