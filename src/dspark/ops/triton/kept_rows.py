"""Rows from a product into the state: sections are added, rows normalised, turned, transformed and quantised at once.

Everything works on float32 blocks [ROWS, BLOCK_K] of whole rows; where rows are bf16, each step rounds as its torch
twin does. Keys go to their ring in the launch that makes them: it begins when all that came before it has read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.compress import GroupRows
from dspark.ops.kept_rows import RowForm, RowNorm
from dspark.ops.places import RingRows
from dspark.ops.rope import Turn
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16, section_sum
from dspark.ops.triton.launch import INTERPRETED, block_of, new_output, packed, rounded
from dspark.ops.triton.places import ring_place
from dspark.ops.triton.quantise import KINDS, NONE, fake_quantise
from dspark.ops.triton.rope import turn_pairs

_HEADS = 16  # of one program


@triton.jit
def normalise(x, weight, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr):
    """Rows [ROWS, BLOCK_K] over their root mean square, times a weight."""
    lanes = tl.arange(0, BLOCK_K)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / K + eps)
    x = x * rstd[:, None] * tl.load(weight + lanes, mask=lanes < K, other=0.0)[None, :]
    return round_bf16(x, PLAIN) if ROUND else x


@triton.jit
def _hadamard(x, K: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr):
    """See `dspark.ops.hadamard.hadamard`."""
    for _ in tl.static_range(STEPS):
        left, right = tl.split(tl.reshape(x, (ROWS, K // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), (ROWS, K))
    return x


@triton.jit
def form_rows_of(
    x, KIND: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr, STEPS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Rows in their form: a Hadamard transform of 2 ** STEPS elements if there are STEPS, then fake quantisation."""
    if STEPS:
        x = _hadamard(x, K, STEPS, ROWS) * (K**-0.5)
        if ROUND:
            x = round_bf16(x, PLAIN)
    if KIND == NONE:
        return x
    groups = tl.reshape(x, (ROWS * BLOCK_K // GROUP, GROUP))
    found = tl.reshape(fake_quantise(groups, KIND, ROWS * BLOCK_K // GROUP, GROUP), (ROWS, BLOCK_K))
    if SKIP:
        return tl.where((tl.arange(0, BLOCK_K) < K - SKIP)[None, :], found, x)
    return found


@triton.jit
def turned(
    x, cos, sin, K: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, ROUND: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Rows turned by the factors at `cos` and `sin`."""
    x = turn_pairs(x, cos, sin, 1.0, K, ROPE, ROWS, BLOCK_K)
    return round_bf16(x, PLAIN) if ROUND else x


@triton.jit
def store_row(store, place, x, K: tl.constexpr, BLOCK_K: tl.constexpr, PLAIN: tl.constexpr):
    """Write one row [1, BLOCK_K] at a place of a store."""
    lanes = tl.arange(0, BLOCK_K)[None, :]
    if store.dtype.element_ty == tl.bfloat16:
        x = round_bf16(x, PLAIN)
    tl.store(store + place * K + lanes, x.to(store.dtype.element_ty), mask=lanes < K)


@triton.jit
def _key_row(
    sums, weight, cos, sin, rows, slots, positions, ring_rows, row, step, eps, COLUMN: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, ROPE: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SKIP: tl.constexpr, SECTIONS: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Row `row` of `rows`, or where it belongs in them if there are slots, which make them a ring."""
    place = row
    if slots is not None:
        place = ring_place(tl.load(slots + row), tl.load(positions + row), ring_rows)
    lanes = tl.arange(0, BLOCK_K)[None, :]
    x = section_sum(sums, row * N + COLUMN + lanes, lanes < K, step, SECTIONS, ROUND, PLAIN)
    x = normalise(x, weight, eps, K, BLOCK_K, ROUND, PLAIN)
    x = turned(x, cos + row * ROPE, sin + row * ROPE, K, ROPE, 1, BLOCK_K, ROUND, PLAIN)
    x = form_rows_of(x, KIND, GROUP, SKIP, 0, K, 1, BLOCK_K, ROUND, PLAIN)
    if place >= 0:
        store_row(rows, place, round_bf16(x, PLAIN) if ROUND else x, K, BLOCK_K, PLAIN)


@triton.jit(do_not_specialize=["ring_rows"])
def _key_rows(
    sums, weight, cos, sin, rows, slots, positions, ring_rows, eps, COLUMN: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, ROPE: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SKIP: tl.constexpr, SECTIONS: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row, step = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64) * N
    _key_row(
        sums, weight, cos, sin, rows, slots, positions, ring_rows, row, step, eps, COLUMN, N, K, ROPE, BLOCK_K, KIND,
        GROUP, SKIP, SECTIONS, ROUND, PLAIN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ring_rows"])
def _latents(
    sums, q_weight, weight, cos, sin, latents, rows, slots, positions, ring_rows, q_eps, eps, Q: tl.constexpr,
    K: tl.constexpr, ROPE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, Q_KIND: tl.constexpr,
    Q_GROUP: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr, SECTIONS: tl.constexpr,
    ROUND: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Two programs a row: its query latent and its window key."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * (Q + K)
    begin(EARLY)
    if tl.program_id(1) == 0:
        lanes = tl.arange(0, BLOCK_Q)[None, :]
        x = section_sum(sums, row * (Q + K) + lanes, lanes < Q, step, SECTIONS, ROUND, PLAIN)
        x = normalise(x, q_weight, q_eps, Q, BLOCK_Q, ROUND, PLAIN)
        x = form_rows_of(x, Q_KIND, Q_GROUP, 0, 0, Q, 1, BLOCK_Q, ROUND, PLAIN)
        store_row(latents, row, x, Q, BLOCK_Q, PLAIN)
    else:
        _key_row(
            sums, weight, cos, sin, rows, slots, positions, ring_rows, row, step, eps, Q, Q + K, K, ROPE, BLOCK_K,
            KIND, GROUP, SKIP, SECTIONS, ROUND, PLAIN,
        )  # fmt: skip


@triton.jit
def _keep(
    x, weight, cos, sin, places, store, eps, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr, STEPS: tl.constexpr, ROUND: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin(EARLY)
    place = tl.load(places + row)
    if place < 0:
        return
    lanes = tl.arange(0, BLOCK_K)[None, :]
    found = tl.load(x + row * K + lanes, mask=lanes < K, other=0.0).to(tl.float32)
    found = normalise(found, weight, eps, K, BLOCK_K, ROUND, PLAIN)
    found = turned(found, cos + row * ROPE, sin + row * ROPE, K, ROPE, 1, BLOCK_K, ROUND, PLAIN)
    found = form_rows_of(found, KIND, GROUP, SKIP, STEPS, K, 1, BLOCK_K, ROUND, PLAIN)
    store_row(store, place, found, K, BLOCK_K, PLAIN)


@triton.jit
def _form(
    x, cos, sin, out, H, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr, STEPS: tl.constexpr, ROUND: tl.constexpr,
    EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """One program a row and block of heads."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_K)
    inside = (heads < H)[:, None] & (lanes < K)[None, :]
    places = (row * H + heads)[:, None] * K + lanes[None, :]
    begin(EARLY)
    found = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    found = turned(found, cos + row * ROPE, sin + row * ROPE, K, ROPE, BLOCK_H, BLOCK_K, ROUND, PLAIN)
    found = form_rows_of(found, KIND, GROUP, SKIP, STEPS, K, BLOCK_H, BLOCK_K, ROUND, PLAIN)
    tl.store(out + places, found.to(out.dtype.element_ty), mask=inside)


def form_constants(form: RowForm, size: int) -> tuple[int, int, int, int]:
    """KIND, GROUP, SKIP, STEPS of a form of rows of `size`."""
    steps = size.bit_length() - 1 if form.hadamard else 0
    return KINDS[form.kind], max(form.group, 1), form.skip, steps


def form_rows(rows: Tensor, turn: Turn, form: RowForm) -> Tensor:
    """See `dspark.ops.kept_rows.RowOps.form_rows`."""
    num_heads, size = rows.shape[1] if rows.dim() == 3 else 1, rows.shape[-1]
    out = new_output(rows, *rows.shape)
    if rows.shape[0]:
        heads, early = min(block_of(num_heads), _HEADS), early_launch()
        _form[(rows.shape[0], triton.cdiv(num_heads, heads))](
            packed(rows), packed(turn[0]), packed(turn[1]), out, num_heads, size, turn[0].shape[-1], heads,
            block_of(size), *form_constants(form, size), rows.dtype == torch.bfloat16, early, INTERPRETED,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return rounded(out, rows)


class _KeyStore(NamedTuple):
    """Where a launch puts its keys: new rows [T, K], or a ring [S, ring_rows, K] by slots and positions [T]."""

    rows: Tensor
    slots: Tensor | None
    positions: Tensor | None
    ring_rows: int


def _key_store(num_rows: int, size: int, dtype: torch.dtype, device: torch.device, home: RingRows | None) -> _KeyStore:
    if home is None:
        return _KeyStore(torch.empty(num_rows, size, dtype=dtype, device=device), None, None, 0)
    return _KeyStore(home.ring, packed(home.slots), packed(home.positions), home.ring.shape[1])


def key_rows(
    sums: Tensor,
    column: int,
    dtype: torch.dtype,
    norm: RowNorm,
    turn: Turn,
    form: RowForm,
    home: RingRows | None,
) -> Tensor:
    """See `dspark.ops.kept_rows.RowOps.key_rows`; without a Hadamard transform, and a ring is contiguous."""
    sections, num_rows, width = sums.shape
    size, early = norm.weight.shape[0], early_launch()
    keys = _key_store(num_rows, size, dtype, sums.device, home)
    if num_rows:
        _key_rows[(num_rows,)](
            packed(sums), norm.weight, packed(turn[0]), packed(turn[1]), *keys, norm.eps, column, width, size,
            turn[0].shape[-1], block_of(size), *form_constants(form, size)[:3], sections, dtype == torch.bfloat16,
            early, INTERPRETED, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return keys.rows


def latents(
    sums: Tensor,
    dtype: torch.dtype,
    query: tuple[RowNorm, RowForm],
    key: tuple[RowNorm, RowForm],
    turn: Turn,
    home: RingRows | None,
) -> tuple[Tensor, Tensor]:
    """See `dspark.ops.kept_rows.RowOps.latents`."""
    sections, num_rows, _ = sums.shape
    q_size, size, early = query[0].weight.shape[0], key[0].weight.shape[0], early_launch()
    latent = torch.empty(num_rows, q_size, dtype=dtype, device=sums.device)
    keys = _key_store(num_rows, size, dtype, sums.device, home)
    if num_rows:
        _latents[(num_rows, 2)](
            packed(sums), query[0].weight, key[0].weight, packed(turn[0]), packed(turn[1]), latent, *keys,
            query[0].eps, key[0].eps, q_size, size, turn[0].shape[-1], block_of(q_size), block_of(size),
            *form_constants(query[1], q_size)[:2], *form_constants(key[1], size)[:3], sections,
            dtype == torch.bfloat16, early, INTERPRETED, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return latent, keys.rows


def keep_rows(rows: Tensor, norm: RowNorm, turn: Turn, form: RowForm, groups: GroupRows) -> None:
    """See `dspark.ops.kept_rows.RowOps.keep_rows`."""
    num_rows, size = rows.shape
    if num_rows:
        early = early_launch()
        _keep[(num_rows,)](
            packed(rows), norm.weight, packed(turn[0]), packed(turn[1]), packed(groups.places), groups.store, norm.eps,
            size, turn[0].shape[-1], block_of(size), *form_constants(form, size), rows.dtype == torch.bfloat16, early,
            INTERPRETED, num_warps=4, launch_pdl=early,
        )  # fmt: skip
