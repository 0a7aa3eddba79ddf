"""Hyper-connections: a half's input in two launches.

The first writes what is pending into the streams and projects them to mix logits, whose sums are left in sections of
fixed columns, each program holding its section of the projection for all its rows; the second adds the sections up and
makes the input and the next mix.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.experts import Output
from dspark.ops.hyper import HalfInput, Residual, StreamMix
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.elementwise import round_bf16, section_sum, sigmoid
from dspark.ops.triton.launch import INTERPRETED, block_of, new_output, packed, rounded, unbroken
from dspark.ops.triton.quantise import rounded_fp8
from dspark.ops.triton.streams import written_streams

_SECTION = 32  # columns of each stream in a section
_MOST_PROGRAMS = 4096  # of a projection; above, each takes several rows
_FEW_COLUMNS = 4096  # that four warps hold in their registers
_PART = 1024  # columns of a row's input that a program makes
_PLAIN_GROUP = 128  # columns that lie together where none share a scale


@triton.jit
def _output(
    slots, sections, row, columns, inside, step,
    D: tl.constexpr, SLOTS: tl.constexpr, SECTIONS: tl.constexpr, ROUND: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """A half's output at some columns: the sum of its slots, then of its sections (`dspark.ops.experts.Terms`)."""
    total = tl.zeros(columns.shape, dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        total += tl.load(slots + (row * SLOTS + slot) * D + columns, mask=inside, other=0.0).to(tl.float32)
    total += section_sum(sections, row * D + columns, inside, step, SECTIONS, ROUND, PLAIN)
    return round_bf16(total, PLAIN) if ROUND else total


@triton.jit(do_not_specialize=["T", "rows_each"])
def _project(
    slots, parts, streams, post, comb, fn, written, sums, T, rows_each,
    D: tl.constexpr, S: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, BLOCK_S: tl.constexpr,
    SECTION: tl.constexpr, SLOTS: tl.constexpr, SECTIONS: tl.constexpr, ROUND: tl.constexpr, EARLY: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """A section of some rows: whole streams, and the section's sums of N products with `fn` and of squares.

    Nothing is pending where there are no `SECTIONS` of an output.
    """
    section, sections = tl.program_id(0), tl.num_programs(0)
    outputs, lanes = tl.arange(0, LANES), tl.arange(0, BLOCK_S * SECTION)
    columns, to = section * SECTION + lanes % SECTION, lanes // SECTION
    inside = (columns < D) & (to < S)
    places = outputs[:, None] * (S * D) + (to * D + columns)[None, :]
    weights = tl.load(fn + places, mask=(outputs < N)[:, None] & inside[None, :], other=0.0)
    begin(EARLY)
    first = tl.program_id(1).to(tl.int64) * rows_each
    for step in range(tl.minimum(rows_each, T - first)):
        row = first + step
        if SECTIONS > 0:
            own = _output(slots, parts, row, columns, inside, T * D, D, SLOTS, SECTIONS, ROUND, PLAIN)
            found = written_streams(own, streams, post, comb, row, columns, to, inside, D, S)
            if ROUND:
                found = round_bf16(found, PLAIN)
            tl.store(written + (row * S + to) * D + columns, found.to(written.dtype.element_ty), mask=inside)
        else:
            found = tl.load(streams + (row * S + to) * D + columns, mask=inside, other=0.0).to(tl.float32)
        factors = tl.where((outputs == N)[:, None], found[None, :], weights)
        tl.store(sums + (row * sections + section) * LANES + outputs, tl.sum(factors * found[None, :], 1))


@triton.jit
def _inverse(x):
    """1 / x of positive numbers, in two instructions instead of a division's ten."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _balanced(logits, inside, eps, STEPS: tl.constexpr):
    """A doubly stochastic matrix from logits [S, S] (Sinkhorn): softmax of the rows, then columns and rows in turn."""
    whole = inside[:, None] & inside[None, :]
    logits = tl.where(whole, logits, float("-inf"))
    comb = tl.exp(logits - tl.where(inside, tl.max(logits, 1), 0.0)[:, None])
    comb = tl.where(whole, comb * _inverse(tl.where(inside, tl.sum(comb, 1), 1.0))[:, None] + eps, 0.0)
    comb = comb * _inverse(tl.sum(comb, 0) + eps)[None, :]
    for _ in range(STEPS - 1):
        comb = comb * _inverse(tl.sum(comb, 1) + eps)[:, None]
        comb = comb * _inverse(tl.sum(comb, 0) + eps)[None, :]
    return comb


@triton.jit
def _mix(
    sums, scale, base, post_out, comb_out, row, eps, stream_eps,
    D: tl.constexpr, S: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
    SECTIONS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mix with which a row's output will be written: post and comb. Reads everything before it computes."""
    i, pairs, sections = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_S * BLOCK_S), tl.arange(0, BLOCK)
    inside, in_pair = i < S, (pairs // BLOCK_S < S) & (pairs % BLOCK_S < S)
    posts, combs = S + i, 2 * S + (pairs // BLOCK_S) * S + pairs % BLOCK_S
    post_base, comb_base = tl.load(base + posts, mask=inside, other=0.0), tl.load(base + combs, mask=in_pair, other=0.0)
    post_scale, comb_scale = tl.load(scale + 1), tl.load(scale + 2)
    begin(EARLY)
    sums += sections[:, None] * LANES
    is_section = (sections < SECTIONS)[:, None]
    squares = tl.load(sums + N, mask=is_section, other=0.0)
    post = tl.load(sums + posts[None, :], mask=is_section & inside[None, :], other=0.0)
    comb = tl.load(sums + combs[None, :], mask=is_section & in_pair[None, :], other=0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / (S * D) + stream_eps)
    post = 2.0 * sigmoid(tl.sum(post, 0) * rstd * post_scale + post_base)
    tl.store(post_out + row * S + i, post, mask=inside)
    logits = tl.sum(comb, 0) * rstd * comb_scale + comb_base
    comb = _balanced(tl.reshape(logits, (BLOCK_S, BLOCK_S)), inside, eps, STEPS)
    tl.store(comb_out + row * S * S + i[:, None] * S + i[None, :], comb, mask=inside[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["carried_step"])
def _read(
    streams, carried, sums, scale, base, norm_weight, out, quantised, hidden, pre_out, post_out, comb_out,
    carried_step, eps, stream_eps, norm_eps,
    D: tl.constexpr, S: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
    SECTIONS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SHIFTED: tl.constexpr, QUANTISE: tl.constexpr, HEAD: tl.constexpr,
    ROUND: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """A row's input by `PARTS` programs, the mix of its output by one more; `HEAD` keeps the collapsed row instead.

    Each program collapses the whole row for its mean square, and writes its own part. It waits for memory once: all
    that can be read is asked for before anything is computed.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sums += row * SECTIONS * LANES
    if part == PARTS:
        _mix(
            sums, scale, base, post_out, comb_out, row, eps, stream_eps,
            D, S, N, LANES, STEPS, SECTIONS, BLOCK, BLOCK_S, EARLY,
        )  # fmt: skip
        return
    i, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    outputs, sections = tl.arange(0, LANES), tl.arange(0, BLOCK)
    lanes = part * (GROUPS * GROUP) + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = lanes < D
    factor = tl.load(norm_weight + lanes, mask=inside, other=0.0)
    pre_base, pre_scale = tl.load(base + outputs, mask=outputs < S, other=0.0), tl.load(scale)
    begin(EARLY)
    streams += row * S * D
    totals = tl.load(
        sums + sections[:, None] * LANES + outputs[None, :], mask=(sections < SECTIONS)[:, None], other=0.0
    )
    known = (i < S)[:, None] & (columns < D)[None, :]
    whole = tl.load(streams + i[:, None] * D + columns[None, :], mask=known, other=0.0)
    if SHIFTED:
        pre = tl.load(carried + row * carried_step + outputs, mask=outputs < S, other=0.0)
    totals = tl.sum(totals, 0)
    rstd = tl.rsqrt(tl.sum(tl.where(outputs == N, totals, 0.0), 0) / (S * D) + stream_eps)
    own_pre = sigmoid(totals * rstd * pre_scale + pre_base) + eps
    if part == 0 and not HEAD:
        tl.store(pre_out + row * S + outputs, own_pre, mask=outputs < S)
    if not SHIFTED:
        pre = own_pre
    weights = tl.zeros([BLOCK_S], dtype=tl.float32)
    x = tl.zeros([GROUPS, GROUP], dtype=tl.float32)
    for stream in tl.static_range(S):
        weight = tl.sum(tl.where(outputs == stream, pre, 0.0), 0)
        weights = tl.where(i == stream, weight, weights)
        x += tl.load(streams + stream * D + lanes, mask=inside, other=0.0).to(tl.float32) * weight
    collapsed = tl.sum(whole.to(tl.float32) * weights[:, None], 0)
    if ROUND:
        collapsed, x = round_bf16(collapsed, PLAIN), round_bf16(x, PLAIN)
    if HEAD:
        tl.store(hidden + row * D + lanes, x.to(hidden.dtype.element_ty), mask=inside)
    x = x * tl.rsqrt(tl.sum(collapsed * collapsed, 0) / D + norm_eps) * factor
    tl.store(out + row * D + lanes, x.to(out.dtype.element_ty), mask=inside)
    if QUANTISE:
        if ROUND:
            x = round_bf16(x, PLAIN)
        tl.store(quantised + row * D + lanes, rounded_fp8(x).to(quantised.dtype.element_ty), mask=inside)


class _Sums(NamedTuple):
    """Whole streams [T, S, D], and the sections' sums [T, sections, lanes] of their projection."""

    streams: Tensor
    sections: Tensor


def _projected(residual: Residual, fn: Tensor) -> _Sums:
    """The first launch: write what is pending, and project."""
    streams = packed(residual.streams)
    num_rows, size, width = streams.shape
    sections, lanes = triton.cdiv(width, _SECTION), block_of(fn.shape[0] + 1, least=16)
    sums = torch.empty(num_rows, sections, lanes, dtype=torch.float32, device=streams.device)
    written, mix, early = streams, (streams, streams), early_launch()
    slots, parts = streams[:, :0], streams[:0]
    if residual.pending is not None:
        output, back = residual.pending
        slots, parts = _terms_of(output)
        mix = packed(back.post), packed(back.comb)
        written = new_output(streams, num_rows, size, width)
    if num_rows:
        rows_each = triton.cdiv(num_rows * sections, _MOST_PROGRAMS)
        _project[(sections, triton.cdiv(num_rows, rows_each))](
            slots, parts, streams, *mix, packed(fn), written, sums, num_rows, rows_each,
            width, size, fn.shape[0], lanes, block_of(size), _SECTION, slots.shape[1], parts.shape[0],
            streams.dtype == torch.bfloat16, early, INTERPRETED, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return _Sums(rounded(written, streams), sums)


def _terms_of(output: Output) -> tuple[Tensor, Tensor]:
    """Slots [T, k, D] and sections [n, T, D] of a half's output; a tensor is one section."""
    if isinstance(output, Tensor):
        return output[:, None][:, :0], packed(output).unsqueeze(0)
    sections = packed(output.sections)
    return sections[0][:, None][:, :0] if output.slots is None else packed(output.slots), sections


def _launch_read(
    sums: _Sums, carried: Tensor | None, scale: Tensor, base: Tensor, norm_weight: Tensor, outputs: tuple[Tensor, ...],
    iterations: int, numbers: tuple[float, float, float], group: int, is_head: bool,
) -> None:  # fmt: skip
    """The second launch; `outputs` are the input, the same quantised, the collapsed row, and the mix."""
    streams, (_, sections, lanes) = sums.streams, sums.sections.shape
    num_rows, size, width = streams.shape
    columns, early = group or _PLAIN_GROUP, early_launch()
    groups = max(_PART // columns, 1)
    parts = triton.cdiv(width, groups * columns)
    _read[(num_rows, parts + (not is_head))](
        streams, streams if carried is None else carried, sums.sections, packed(scale), packed(base),
        packed(norm_weight), *outputs, 0 if carried is None else carried.stride(0), *numbers,
        width, size, base.shape[0], lanes, iterations, sections, block_of(sections), block_of(size), block_of(width),
        groups, columns, parts, carried is not None, group > 0, is_head, streams.dtype == torch.bfloat16, early,
        INTERPRETED, num_warps=4 if width <= _FEW_COLUMNS else 8, launch_pdl=early,
    )  # fmt: skip


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
    """See `dspark.ops.hyper.StreamReader.read_streams`; two launches."""
    sums = _projected(residual, fn)
    streams = sums.streams
    num_rows, size, width = streams.shape
    pre, post = (torch.empty(num_rows, size, dtype=torch.float32, device=streams.device) for _ in range(2))
    comb = torch.empty(num_rows, size, size, dtype=torch.float32, device=streams.device)
    out = new_output(streams, num_rows, width)
    quantised = torch.empty_like(out) if group else out
    if num_rows:
        carried = unbroken(residual.carried) if is_shifted else None
        outputs, numbers = (out, quantised, out, pre, post, comb), (eps, stream_eps, norm_eps)
        _launch_read(sums, carried, scale, base, norm_weight, outputs, iterations, numbers, group, False)
    x = rounded(out, streams)
    return HalfInput(x, rounded(quantised, streams) if group else x, streams, StreamMix(pre, post, comb))


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
    """See `dspark.ops.hyper.StreamReader.read_head`; two launches."""
    sums = _projected(residual, fn)
    num_rows, _, width = sums.streams.shape
    hidden, out = (new_output(sums.streams, num_rows, width) for _ in range(2))
    if num_rows:
        numbers = eps, stream_eps, norm_eps
        outputs = out, out, hidden, out, out, out
        _launch_read(sums, None, scale, base, norm_weight, outputs, 0, numbers, 0, True)
    return rounded(hidden, sums.streams), rounded(out, sums.streams)
