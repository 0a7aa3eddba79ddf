"""Hyper-connections: reading a half's input in two launches, and sums over streams in stream order.

The projection to mix logits has few outputs and a long row, so each row is cut into sections of a fixed length, whose
sums are added from the first to the last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.hyper import HalfInput, Residual, StreamMix, head_mix, written_streams
from dspark.ops.triton import plain_product
from dspark.ops.triton.elementwise import round_bf16, sigmoid
from dspark.ops.triton.launch import INTERPRETED, block_of, new_output, packed, rounded, warps_of
from dspark.ops.triton.norm import rms_norm, stream_rstd
from dspark.ops.triton.quantise import quantise_fp8

_BLOCK = 256
_SECTION = 1024
_STEP = tl.constexpr(128)


@triton.jit
def _project(streams, fn, out, WIDTH: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, SECTION: tl.constexpr):
    """Sums of one section of a row: N products with `fn`, then the squares."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SECTION
    outputs, lanes = tl.arange(0, LANES), tl.arange(0, _STEP)
    products = tl.zeros([LANES, _STEP], dtype=tl.float32)
    squares = tl.zeros([_STEP], dtype=tl.float32)
    for start in tl.static_range(0, SECTION, _STEP):
        columns = first + start + lanes
        inside = columns < WIDTH
        part = tl.load(streams + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(
            fn + outputs[:, None] * WIDTH + columns[None, :], mask=(outputs < N)[:, None] & inside[None, :], other=0.0
        )
        products += weight * part[None, :]
        squares += part * part
    sums = tl.where(outputs == N, tl.sum(squares, 0), tl.sum(products, 1))
    tl.store(out + (row * tl.num_programs(1) + tl.program_id(1)) * LANES + outputs, sums, mask=outputs <= N)


@triton.jit
def _logits(sums, places, mask, rstd, SECTIONS: tl.constexpr, LANES: tl.constexpr):
    """Mix logits at some places of a row: their sums over the sections in order, times the row's rstd."""
    total = tl.load(sums + places, mask=mask, other=0.0)
    for section in tl.static_range(1, SECTIONS):
        total += tl.load(sums + section * LANES + places, mask=mask, other=0.0)
    return total * rstd


@triton.jit
def _read(
    streams,
    carried,
    sums,
    scale,
    base,
    norm_weight,
    out,
    pre_out,
    post_out,
    comb_out,
    eps,
    stream_eps,
    norm_eps,
    D: tl.constexpr,
    S: tl.constexpr,
    STEPS: tl.constexpr,
    SECTIONS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SHIFTED: tl.constexpr,
    ROUND: tl.constexpr,
    PLAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sums += row * SECTIONS * LANES
    i = tl.arange(0, BLOCK_S)
    inside = i < S
    squares = tl.load(sums + (2 + S) * S)
    for section in tl.static_range(1, SECTIONS):
        squares += tl.load(sums + section * LANES + (2 + S) * S)
    rstd = tl.rsqrt(squares / (S * D) + stream_eps)
    pre = _logits(sums, i, inside, rstd, SECTIONS, LANES) * tl.load(scale)
    pre = sigmoid(pre + tl.load(base + i, mask=inside, other=0.0)) + eps
    tl.store(pre_out + row * S + i, pre, mask=inside)
    post = _logits(sums, S + i, inside, rstd, SECTIONS, LANES) * tl.load(scale + 1)
    post = 2.0 * sigmoid(post + tl.load(base + S + i, mask=inside, other=0.0))
    tl.store(post_out + row * S + i, post, mask=inside)
    square = i[:, None] * S + i[None, :]
    whole = inside[:, None] & inside[None, :]
    comb = _logits(sums, 2 * S + square, whole, rstd, SECTIONS, LANES) * tl.load(scale + 2)
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
    lanes = tl.arange(0, BLOCK_D)
    known = lanes < D
    x = tl.zeros([BLOCK_D], dtype=tl.float32)
    for stream in tl.static_range(S):
        if IS_SHIFTED:
            weight = tl.load(carried + row * S + stream)
        else:
            weight = tl.sum(tl.where(i == stream, pre, 0.0), 0)
        x += tl.load(streams + (row * S + stream) * D + lanes, mask=known, other=0.0).to(tl.float32) * weight
    if ROUND:
        x = round_bf16(x, PLAIN)
    norm = tl.rsqrt(tl.sum(x * x, 0) / D + norm_eps)
    x = x * norm * tl.load(norm_weight + lanes, mask=known, other=0.0)
    tl.store(out + row * D + lanes, x.to(out.dtype.element_ty), mask=known)


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


def read_streams(
    residual: Residual,
    is_shifted: bool,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    iterations: int,
    eps: float,
    stream_eps: float,
    norm_eps: float,
    group: int,
) -> HalfInput:
    """See `dspark.ops.hyper.StreamReader.read_streams`."""
    streams = written_streams(residual, expand_streams)
    carried = residual.carried if is_shifted else None
    num_rows, size, width = streams.shape
    device = streams.device
    pre, post = (torch.empty(num_rows, size, dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty(num_rows, size, size, dtype=torch.float32, device=device)
    out = new_output(streams, num_rows, width)
    if num_rows:
        streams = packed(streams)
        sections, lanes = triton.cdiv(size * width, _SECTION), block_of(fn.shape[0] + 1, least=16)
        sums = torch.empty(num_rows, sections, lanes, dtype=torch.float32, device=device)
        _project[(num_rows, sections)](
            streams, packed(fn), sums, size * width, fn.shape[0], lanes, _SECTION, num_warps=4
        )
        block = block_of(width)
        _read[(num_rows,)](
            streams,
            None if carried is None else packed(carried),
            sums,
            packed(scale),
            packed(base),
            packed(norm_weight),
            out,
            pre,
            post,
            comb,
            eps,
            stream_eps,
            norm_eps,
            width,
            size,
            iterations,
            sections,
            lanes,
            block_of(size),
            block,
            carried is not None,
            streams.dtype == torch.bfloat16,
            INTERPRETED,
            num_warps=warps_of(block),
        )
    x = rounded(out, streams)
    return HalfInput(x, quantise_fp8(x, group) if group else x, streams, StreamMix(pre, post, comb))


def read_head(
    residual: Residual,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor,
    eps: float,
    stream_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """See `dspark.ops.hyper.StreamReader.read_head`."""
    streams = written_streams(residual, expand_streams)
    flat = streams.flatten(1).float()
    logits = plain_product.linear(flat, fn) * stream_rstd(flat, stream_eps)
    hidden = collapse_streams(streams, head_mix(logits, scale, base, eps))
    return hidden, rms_norm(hidden, norm_weight, norm_eps)


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
