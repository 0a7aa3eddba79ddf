"""Pooling of groups, and the inputs of open ones: one program a group, and one a row of the pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.compress import GroupRows, PoolShape
from dspark.ops.kept_rows import RowForm, RowNorm
from dspark.ops.rope import Turn
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16, section_sum
from dspark.ops.triton.kept_rows import form_constants, form_rows_of, normalise, store_row, turned
from dspark.ops.triton.launch import INTERPRETED, block_of, packed

_MEMBERS = 8192  # elements of a block of members
_KEEP_BLOCK = 512


@triton.jit
def _member_rows(
    sums, tail, row, is_own, place, exists, columns, step, N: tl.constexpr, D: tl.constexpr, COLUMN: tl.constexpr,
    SECTIONS: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_K] values or gates of members: of rows of the pass, or kept by passes before it."""
    own = section_sum(sums, row[:, None] * N + COLUMN + columns, exists & is_own[:, None], step, SECTIONS, ROUND, PLAIN)
    kept = tl.load(tail + place[:, None] * D + columns, mask=exists & (is_own == 0)[:, None], other=0.0)
    return own, kept


@triton.jit
def _pool(
    sums, bias, tail, members, num_places, group, step, N: tl.constexpr, K: tl.constexpr, COLUMN: tl.constexpr,
    RATIO: tl.constexpr, REACH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SECTIONS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """[1, BLOCK_K] the softmax of a group's gates over its members, applied to their values."""
    P: tl.constexpr = K * (REACH // RATIO)
    lanes = tl.arange(0, BLOCK_K)
    top = tl.full([BLOCK_K], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_K], dtype=tl.float32)
    pooled = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, REACH, BLOCK_M):
        member = start + tl.arange(0, BLOCK_M)
        place = tl.load(members + group * REACH + member, mask=member < REACH, other=-1)
        is_own = place >= num_places
        exists = (place >= 0)[:, None] & (lanes < K)[None, :]
        row = tl.where(is_own, place - num_places, 0)
        # The group before gives its first K channels, the own one its second.
        columns = ((member // RATIO) * K)[:, None] + lanes[None, :]
        gates, kept_gates = _member_rows(
            sums, tail, row, is_own, place, exists, P + columns, step, N, 2 * P, COLUMN, SECTIONS, ROUND, PLAIN
        )
        if HAS_BIAS:
            gates += tl.load(bias + (member % RATIO)[:, None] * P + columns, mask=exists, other=0.0)
        gates = tl.where(exists, tl.where(is_own[:, None], gates, kept_gates), float("-inf"))
        values, kept_values = _member_rows(
            sums, tail, row, is_own, place, exists, columns, step, N, 2 * P, COLUMN, SECTIONS, ROUND, PLAIN
        )
        values = tl.where(is_own[:, None], values, kept_values)
        best = tl.maximum(top, tl.max(gates, 0))
        kept = tl.where(top == best, 1.0, tl.exp(top - best))
        weights = tl.where(exists, tl.exp(gates - best[None, :]), 0.0)
        total = total * kept + tl.sum(weights, 0)
        pooled = pooled * kept + tl.sum(weights * values, 0)
        top = best
    return tl.where(lanes < K, pooled / total, 0.0)[None, :]


@triton.jit
def _keep_inputs(
    sums, bias, tail, kept, positions, row, step, N: tl.constexpr, P: tl.constexpr, COLUMN: tl.constexpr,
    RATIO: tl.constexpr, BLOCK: tl.constexpr, SECTIONS: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Write a row's values and gates where its open group is kept."""
    place = tl.load(kept + row)
    if place >= 0:
        slot = tl.load(positions + row) % RATIO
        for start in tl.static_range(0, 2 * P, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            inside = lanes < 2 * P
            found = section_sum(sums, row * N + COLUMN + lanes, inside, step, SECTIONS, ROUND, PLAIN)
            if HAS_BIAS:
                found += tl.load(bias + slot * P + lanes - P, mask=inside & (lanes >= P), other=0.0)
            tl.store(tail + place * (2 * P) + lanes, found, mask=inside)


@triton.jit(do_not_specialize=["T", "C", "first", "num_places"])
def _compress(
    sums, bias, tail, members, kept, positions, num_places, weight, cos, sin, latent, places, store, T, C, first, eps,
    N: tl.constexpr, K: tl.constexpr, COLUMN: tl.constexpr, RATIO: tl.constexpr, REACH: tl.constexpr,
    GATED: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, KEEP_BLOCK: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr, STEPS: tl.constexpr, SECTIONS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Programs 0..C - 1 (counted from `first`) pool a group each, the next T keep a row's inputs."""
    number = tl.program_id(0).to(tl.int64) + first
    step = T.to(tl.int64) * N
    P: tl.constexpr = K * (REACH // RATIO)
    begin(EARLY)
    if number >= C:
        _keep_inputs(
            sums, bias, tail, kept, positions, number - C, step, N, P, COLUMN, RATIO, KEEP_BLOCK, SECTIONS, HAS_BIAS,
            ROUND, PLAIN,
        )  # fmt: skip
    else:
        place = tl.load(places + number)
        if place >= 0:
            lanes = tl.arange(0, BLOCK_K)[None, :]
            if GATED:
                x = _pool(
                    sums, bias, tail, members, num_places, number, step, N, K, COLUMN, RATIO, REACH, BLOCK_M, BLOCK_K,
                    SECTIONS, HAS_BIAS, ROUND, PLAIN,
                )  # fmt: skip
                if ROUND:
                    x = round_bf16(x, PLAIN)
            else:
                x = section_sum(sums, number * N + COLUMN + lanes, lanes < K, step, SECTIONS, ROUND, PLAIN)
            x = normalise(x, weight, eps, K, BLOCK_K, ROUND, PLAIN)
            store_row(latent, number, x, K, BLOCK_K, PLAIN)
            x = turned(x, cos + number * ROPE, sin + number * ROPE, K, ROPE, 1, BLOCK_K, ROUND, PLAIN)
            x = form_rows_of(x, KIND, GROUP, SKIP, STEPS, K, 1, BLOCK_K, ROUND, PLAIN)
            store_row(store, place, x, K, BLOCK_K, PLAIN)


def compress(
    sums: Tensor,
    dtype: torch.dtype,
    shape: PoolShape,
    bias: Tensor | None,
    norm: RowNorm,
    turn: Turn,
    form: RowForm,
    groups: GroupRows,
) -> Tensor:
    """See `dspark.ops.kept_rows.RowOps.compress`; rows of `latent` where there is no group after all are not set."""
    sections, num_rows, width = sums.shape
    num_groups, size = groups.positions.shape[0], shape.width
    latent = torch.empty(num_groups, size, dtype=dtype, device=sums.device)
    tail = sums if groups.tail is None else groups.tail
    block_k = block_of(size)
    block_m = min(block_of(shape.reach), max(_MEMBERS // block_k, 1))
    early = early_launch()

    def launch(first: int, count: int) -> None:
        if count:
            _compress[(count,)](
                packed(sums), sums if bias is None else bias, tail, packed(groups.members), packed(groups.kept),
                packed(groups.row_positions), tail.shape[0], norm.weight, packed(turn[0]), packed(turn[1]), latent,
                packed(groups.places), groups.store, num_rows, num_groups, first, norm.eps, width, size, shape.column,
                shape.ratio, shape.reach, shape.is_gated, turn[0].shape[-1], block_m, block_k, _KEEP_BLOCK,
                *form_constants(form, size), sections, bias is not None, dtype == torch.bfloat16, early, INTERPRETED,
                num_warps=8 if block_m * block_k >= _MEMBERS else 4, launch_pdl=early,
            )  # fmt: skip

    if not shape.is_gated:
        launch(0, num_groups)
    elif groups.at_once:
        launch(0, num_groups + num_rows)
    else:
        # A kept row may take the place of a member, so all groups are read before.
        launch(0, num_groups)
        launch(num_groups, num_rows)
    return latent
