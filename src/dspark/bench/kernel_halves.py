"""Launches around the products of a half, at real shapes: the half's input from its streams, and the route of rows.

Few rows of a half take as many microseconds here as in a product, and read little; so the time counts, not the share of
the bandwidth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dspark.bench.device_timing import Call
from dspark.bench.kernel_shapes import ExpertShape
from dspark.ops.experts import Terms
from dspark.ops.hyper import Residual, StreamMix
from dspark.ops.triton import grouping, hyper, route

_STREAMS, _ITERATIONS, _SECTIONS, _EPS = 4, 20, 4, 1e-6
_TURNS = 40  # distinct weights that a chain goes through


@dataclass(frozen=True)
class HalfCase:
    """Calls of one kind over different weights; `is_exact`: the first row's bits are those that it has alone."""

    name: str
    form: str
    num_bytes: int
    calls: list[Call]
    is_exact: bool


def half_cases(shape: ExpertShape, count: int, device: torch.device) -> Iterator[HalfCase]:
    """The input of an attention half whose predecessor left its slots and sections, and the route of the rows."""
    yield _input_case(shape, count, device)
    yield _route_case(shape, count, device)


def _input_case(shape: ExpertShape, count: int, device: torch.device) -> HalfCase:
    mixes = (2 + _STREAMS) * _STREAMS
    maps = [torch.randn(mixes, _STREAMS * shape.D, device=device) * 0.01 for _ in range(_TURNS)]
    scale, base = torch.ones(3, device=device), torch.zeros(mixes, device=device)
    norm = torch.ones(shape.D, device=device)
    slots = torch.randn(count, shape.topk, shape.D, device=device).bfloat16()
    sections = torch.randn(_SECTIONS, count, shape.D, device=device)
    streams = torch.randn(count, _STREAMS, shape.D, device=device).bfloat16()
    pre, post = torch.rand(2, count, _STREAMS, device=device)
    comb = torch.rand(count, _STREAMS, _STREAMS, device=device)

    def read(fn: Tensor, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        mix = StreamMix(pre[rows], post[rows], comb[rows])
        terms = Terms(slots[rows], sections[:, rows], streams.dtype)
        residual = Residual(streams[rows], mix.pre, (terms, mix))
        numbers = _ITERATIONS, _EPS, _EPS, _EPS, shape.group
        half = hyper.read_streams(residual, False, fn, scale, base, norm, *numbers)
        return half.x, half.quantised, half.streams, *half.mix

    whole, alone = read(maps[0]), read(maps[0], slice(1))
    is_exact = all(torch.equal(one, many[:1]) for one, many in zip(alone, whole, strict=True))
    calls: list[Call] = [partial(read, fn) for fn in maps]
    return HalfCase("half's input: both launches", "float32", maps[0].nbytes, calls, is_exact)


def _route_case(shape: ExpertShape, count: int, device: torch.device) -> HalfCase:
    gates = [torch.randn(shape.num_experts, shape.D, device=device).bfloat16() for _ in range(_TURNS)]
    bias = torch.zeros(shape.num_experts, device=device)
    x = (torch.randn(count, shape.D, device=device) * shape.D**-0.5).bfloat16()

    def grouped(gate: Tensor, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        chosen = route.route_rows(x[rows], gate, bias, None, shape.topk, True, 1e-20, 1.5)
        grouping.tiles_of(chosen, shape.num_experts)
        return chosen.expert_ids, chosen.weights

    whole, alone = grouped(gates[0]), grouped(gates[0], slice(1))
    is_exact = all(torch.equal(one, many[:1]) for one, many in zip(alone, whole, strict=True))
    calls: list[Call] = [partial(grouped, gate) for gate in gates]
    return HalfCase("gate, choice, grouping", "bf16", gates[0].nbytes, calls, is_exact)
