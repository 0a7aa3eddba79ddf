"""Hyper-connections: the mix of a row in one program, and the sums over streams in stream order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.hyper import StreamMix
from dspark.ops.triton.elementwise import sigmoid
from dspark.ops.triton.launch import block_of, new_output, packed, rounded

_BLOCK = 256


@triton.jit
def _mix(
    logits, scale, base, pre_out, post_out, comb_out, eps, S: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = row * (2 + S) * S
    i = tl.arange(0, BLOCK)
    inside = i < S
    pre = tl.load(logits + first + i, mask=inside, other=0.0) * tl.load(scale)
    pre = sigmoid(pre + tl.load(base + i, mask=inside, other=0.0)) + eps
    tl.store(pre_out + row * S + i, pre, mask=inside)
    post = tl.load(logits + first + S + i, mask=inside, other=0.0) * tl.load(scale + 1)
    post = 2.0 * sigmoid(post + tl.load(base + S + i, mask=inside, other=0.0))
    tl.store(post_out + row * S + i, post, mask=inside)
    square = i[:, None] * S + i[None, :]
    whole = inside[:, None] & inside[None, :]
    comb = tl.load(logits + first + 2 * S + square, mask=whole, other=0.0) * tl.load(scale + 2)
    comb += tl.load(base + 2 * S + square, mask=whole, other=0.0)
    comb = tl.where(whole, comb, float("-inf"))
    top = tl.where(inside, tl.max(comb, 1), 0.0)
    comb = tl.exp(comb - top[:, None])
    total = tl.where(inside, tl.sum(comb, 1), 1.0)
    comb = tl.where(whole, comb / total[:, None] + eps, 0.0)
    comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    for _ in range(STEPS - 1):
        comb = comb / (tl.sum(comb, 1) + eps)[:, None]
        comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    tl.store(comb_out + row * S * S + square, comb, mask=whole)


@triton.jit
def _collapse(streams, pre, out, D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < D
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for stream in tl.static_range(S):
        part = tl.load(streams + (row * S + stream) * D + lanes, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(pre + row * S + stream)
    tl.store(out + row * D + lanes, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mean(streams, out, D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < D
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for stream in tl.static_range(S):
        total += tl.load(streams + (row * S + stream) * D + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + lanes, (total / S).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expand(output, streams, post, comb, out, D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < D
    written = tl.load(output + row * D + lanes, mask=inside, other=0.0).to(tl.float32)
    for to in tl.static_range(S):
        carried = tl.zeros([BLOCK], dtype=tl.float32)
        for stream in tl.static_range(S):
            part = tl.load(streams + (row * S + stream) * D + lanes, mask=inside, other=0.0).to(tl.float32)
            carried += tl.load(comb + (row * S + stream) * S + to) * part
        found = tl.load(post + row * S + to) * written + carried
        tl.store(out + (row * S + to) * D + lanes, found.to(out.dtype.element_ty), mask=inside)


def mix_streams(
    logits: Tensor, scale: Tensor, base: Tensor, num_streams: int, iterations: int, eps: float
) -> StreamMix:
    """See `dspark.ops.hyper.mix_streams`."""
    num_rows, size = logits.shape[0], num_streams
    pre, post = (torch.empty(num_rows, size, dtype=torch.float32, device=logits.device) for _ in range(2))
    comb = torch.empty(num_rows, size, size, dtype=torch.float32, device=logits.device)
    if num_rows:
        _mix[(num_rows,)](
            packed(logits), scale, base, pre, post, comb, eps, size, iterations, block_of(size), num_warps=1
        )
    return StreamMix(pre, post, comb)


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """See `dspark.ops.hyper.collapse_streams`."""
    num_rows, num_streams, size = streams.shape
    out = new_output(streams, num_rows, size)
    if num_rows:
        _collapse[_grid(num_rows, size)](packed(streams), packed(pre), out, size, num_streams, _BLOCK, num_warps=2)
    return rounded(out, streams)


def mean_streams(streams: Tensor) -> Tensor:
    """See `dspark.ops.hyper.mean_streams`."""
    num_rows, num_streams, size = streams.shape
    out = new_output(streams, num_rows, size)
    if num_rows:
        _mean[_grid(num_rows, size)](packed(streams), out, size, num_streams, _BLOCK, num_warps=2)
    return rounded(out, streams)


def expand_streams(output: Tensor, streams: Tensor, mix: StreamMix) -> Tensor:
    """See `dspark.ops.hyper.expand_streams`."""
    num_rows, num_streams, size = streams.shape
    out = new_output(streams, num_rows, num_streams, size)
    if num_rows:
        _expand[_grid(num_rows, size)](
            packed(output),
            packed(streams),
            packed(mix.post),
            packed(mix.comb),
            out,
            size,
            num_streams,
            _BLOCK,
            num_warps=2,
        )
    return rounded(out, streams)


def _grid(num_rows: int, size: int) -> tuple[int, int]:
    return num_rows, triton.cdiv(size, _BLOCK)
