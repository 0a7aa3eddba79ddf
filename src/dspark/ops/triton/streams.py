"""What is done to residual streams element by element; sums over streams go from the first to the last."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.experts import Output
from dspark.ops.hyper import StreamMix
from dspark.ops.triton.experts import sum_terms
from dspark.ops.triton.launch import new_output, packed, rounded, unbroken

_BLOCK = 256


@triton.jit
def written_streams(own, streams, post, comb, row, columns, to, inside, D: tl.constexpr, S: tl.constexpr):
    """Streams `to` of a row at some columns after its output is written: post * output + sum over streams."""
    carried = tl.zeros(columns.shape, dtype=tl.float32)
    for stream in tl.static_range(S):
        part = tl.load(streams + (row * S + stream) * D + columns, mask=inside, other=0.0).to(tl.float32)
        carried += tl.load(comb + (row * S + stream) * S + to, mask=inside, other=0.0) * part
    return tl.load(post + row * S + to, mask=inside, other=0.0) * own + carried


@triton.jit
def _collapse(streams, pre, out, pre_step, D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < D
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for stream in tl.static_range(S):
        part = tl.load(streams + (row * S + stream) * D + lanes, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(pre + row * pre_step + stream)
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
    inside = lanes < S * D
    own = tl.load(output + row * D + lanes % D, mask=inside, other=0.0).to(tl.float32)
    found = written_streams(own, streams, post, comb, row, lanes % D, lanes // D, inside, D, S)
    tl.store(out + row * S * D + lanes, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed(weight, token_ids, out, D: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < D
    found = tl.load(weight + tl.load(token_ids + row) * D + lanes, mask=inside, other=0.0)
    for stream in tl.static_range(S):
        tl.store(out + (row * S + stream) * D + lanes, found.to(out.dtype.element_ty), mask=inside)


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """See `dspark.ops.hyper.collapse_streams`."""
    num_rows, num_streams, size = streams.shape
    out = new_output(streams, num_rows, size)
    if num_rows:
        weights = unbroken(pre)
        _collapse[_grid(num_rows, size)](
            packed(streams), weights, out, weights.stride(0), size, num_streams, _BLOCK, num_warps=2
        )
    return rounded(out, streams)


def mean_streams(streams: Tensor) -> Tensor:
    """See `dspark.ops.hyper.mean_streams`."""
    num_rows, num_streams, size = streams.shape
    out = new_output(streams, num_rows, size)
    if num_rows:
        _mean[_grid(num_rows, size)](packed(streams), out, size, num_streams, _BLOCK, num_warps=2)
    return rounded(out, streams)


def expand_streams(output: Output, streams: Tensor, mix: StreamMix) -> Tensor:
    """See `dspark.ops.hyper.expand_streams`."""
    whole = output if isinstance(output, Tensor) else sum_terms(output)
    num_rows, num_streams, size = streams.shape
    out = new_output(streams, num_rows, num_streams, size)
    if num_rows:
        mix_back = packed(mix.post), packed(mix.comb)
        _expand[_grid(num_rows, num_streams * size)](
            packed(whole), packed(streams), *mix_back, out, size, num_streams, _BLOCK, num_warps=2
        )
    return rounded(out, streams)


def embed_streams(weight: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype) -> Tensor:
    """See `dspark.ops.hyper.embed_streams`."""
    num_rows, size = token_ids.shape[0], weight.shape[1]
    like = weight.new_empty(0, dtype=dtype)
    out = new_output(like, num_rows, num_streams, size)
    if num_rows:
        _embed[_grid(num_rows, size)](packed(weight), packed(token_ids), out, size, num_streams, _BLOCK, num_warps=2)
    return rounded(out, like)


def _grid(num_rows: int, size: int) -> tuple[int, int]:
    return num_rows, triton.cdiv(size, _BLOCK)
