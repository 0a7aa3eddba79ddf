"""Engram's look-up in one launch: hash of the n-gram and the stored row, read on the device or over the host's bus."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.engram import engram_rows as host_rows
from dspark.ops.table import TABLE_GROUP, StoredTable, TablePlace
from dspark.ops.triton.launch import block_of, packed


@triton.jit
def _power(exponent):
    """2^exponent, also where it is below the normal numbers' range."""
    field = exponent + 127
    return tl.where(field > 0, field << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(code):
    """Values of e4m3 codes."""
    exponent, mantissa = (code >> 3) & 15, (code & 7).to(tl.float32)
    size = tl.where(exponent == 0, mantissa * 0.001953125, (8.0 + mantissa) * _power(exponent - 10))
    return tl.where((code & 128) != 0, -size, size)


@triton.jit
def _engram_rows(
    values,
    scales,
    ngrams,
    multipliers,
    primes,
    offsets,
    out,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and column of look-ups; `ngrams` [T, N], `primes` and `offsets` [(N - 1) * HEADS]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    hashed = tl.load(ngrams + row * N) * tl.load(multipliers)
    for back in tl.static_range(1, N):
        if back <= column // HEADS + 1:
            hashed = hashed ^ (tl.load(ngrams + row * N + back) * tl.load(multipliers + back))
    place = hashed % tl.load(primes + column) + tl.load(offsets + column)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < K
    stored = tl.load(values + place * K + lanes, mask=inside, other=0)
    if CODED:
        groups = (K + GROUP - 1) // GROUP
        field = tl.load(scales + place * groups + lanes // GROUP, mask=inside, other=127).to(tl.int32)
        found = _e4m3(stored.to(tl.int32)) * _power(field - 127)
    else:
        found = stored.to(tl.float32)
    tl.store(out + (row * tl.num_programs(1) + column) * K + lanes, found, mask=inside)


def engram_rows(
    table: Tensor | StoredTable, ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """See `dspark.ops.engram.engram_rows`; the host reads a table that is mapped from a file."""
    if isinstance(table, StoredTable) and table.place is TablePlace.MAPPED:
        return host_rows(table, ngrams, multipliers, primes, offsets)
    values, scales = (table, None) if isinstance(table, Tensor) else (table.values, table.scales)
    (num_rows, length), (columns, width) = ngrams.shape, (primes.numel(), values.shape[1])
    out = torch.empty(num_rows, columns, width, dtype=torch.float32, device=ngrams.device)
    if num_rows:
        _engram_rows[(num_rows, columns)](
            values,
            values if scales is None else scales,
            packed(ngrams),
            multipliers,
            packed(primes),
            packed(offsets),
            out,
            length,
            primes.shape[1],
            width,
            TABLE_GROUP,
            scales is not None,
            block_of(width),
            num_warps=4 if width >= 128 else 1,
        )
    return out
