"""A round's bookkeeping: one program a row of the pass or a request, each reads the whole table that it needs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops.rounds import NUM_SCALARS, BlockRows, Blocks, RoundRows, RoundTable, aligned_rows
from dspark.ops.triton.early import begin, early_launch
from dspark.ops.triton.launch import block_of
from dspark.ops.triton.places import ring_place

_SCALARS = tl.constexpr(NUM_SCALARS)


@triton.jit
def _text_word(place, G: tl.constexpr, H: tl.constexpr):
    """Word of a place in history, anchor, drafts: with H 2 and G 5, places 0 to 7 are words 11 12 0 6 7 8 9 10."""
    return tl.where(place < H, _SCALARS + G + place, tl.where(place == H, 0, _SCALARS - 1 + place - H))


@triton.jit(do_not_specialize=["R"])
def _lay(
    words, columns, ngrams, spans, R, STRIDE, ROWS_STRIDE, SPANS_STRIDE, G: tl.constexpr, H: tl.constexpr,
    NGRAM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lanes < R
    positions = tl.load(words + STRIDE + lanes, mask=inside, other=0)
    limits = tl.load(words + 2 * STRIDE + lanes, mask=inside, other=0)
    lens = tl.load(words + 5 * STRIDE + lanes, mask=inside, other=0)
    counts = tl.where(inside & (positions + 1 < limits), 1 + lens, 0)
    stops = tl.cumsum(counts, 0)
    if row == 0:
        tl.store(spans + lanes, stops - counts, mask=inside)
        tl.store(spans + SPANS_STRIDE + lanes, counts, mask=inside)
    is_over = stops <= row
    owner = tl.minimum(tl.sum((is_over & inside).to(tl.int64), 0), R - 1)
    is_row = row < tl.sum(counts, 0)
    offset = tl.where(is_row, row - tl.max(tl.where(is_over, stops, 0), 0), 0)
    back = tl.arange(0, NGRAM)
    found = words + _text_word(H + offset - back, G, H) * STRIDE + owner
    tokens = tl.load(found, mask=back <= tl.where(is_row, H, -1), other=-1)
    tl.store(ngrams + row * (H + 1) + back, tokens, mask=back <= H)
    own = tl.sum(tl.where(back == 0, tokens, 0), 0)
    tl.store(columns + row, tl.maximum(own, 0))
    position = tl.where(is_row, tl.load(words + STRIDE + owner) + offset, 0)
    tl.store(columns + ROWS_STRIDE + row, position)
    tl.store(columns + 2 * ROWS_STRIDE + row, tl.where(is_row, tl.load(words + 3 * STRIDE + owner), -1))
    tl.store(columns + 3 * ROWS_STRIDE + row, owner)
    tl.store(columns + 4 * ROWS_STRIDE + row, tl.where(is_row, owner, -1))
    tl.store(columns + 5 * ROWS_STRIDE + row, position + 1)
    tl.store(columns + 6 * ROWS_STRIDE + row, offset)


def lay_rows(table: RoundTable, num_rows: int) -> RoundRows:
    """See `dspark.ops.rounds.lay_rows`."""
    words, count = table.words, table.words.shape[1]
    columns, spans = aligned_rows(words, 7, num_rows), aligned_rows(words, 2, count)
    ngrams = words.new_empty(num_rows, 1 + table.history_len)
    early = early_launch()
    _lay[(num_rows,)](
        words, columns, ngrams, spans, count, words.stride(0), columns.stride(0), spans.stride(0), table.width,
        table.history_len, block_of(1 + table.history_len), block_of(count), early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return RoundRows._make([*columns, ngrams, *spans])


@triton.jit(do_not_specialize=["T", "R"])
def _move(
    words, owners, offsets, slots, counts, num_accepted, token_ids, outcome, kept, T, R, STRIDE,
    G: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr, HISTORY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    number = tl.program_id(0).to(tl.int64)
    if number < T:
        is_final = tl.load(offsets + number) <= tl.load(num_accepted + tl.load(owners + number))
        tl.store(kept + number, tl.where(is_final, tl.load(slots + number), -1))
    if number < R:
        accepted, lanes = tl.load(num_accepted + number), tl.arange(0, TOKENS)
        tokens = tl.load(token_ids + number * (G + 1) + lanes, mask=lanes <= G, other=0)
        report = outcome + number * (G + 3)
        tl.store(report, tl.load(words + 5 * STRIDE + number))
        tl.store(report + 1, accepted)
        tl.store(report + 2 + lanes, tokens, mask=lanes <= G)
        if tl.load(counts + number) > 0:
            if H > 0:
                # One warp reads all of it before it writes any.
                places = tl.arange(0, HISTORY)
                text = words + _text_word(accepted + 1 + places, G, H) * STRIDE + number
                last = tl.load(text, mask=places < H, other=-1)
                tl.store(words + (_SCALARS + G + places) * STRIDE + number, last, mask=places < H)
            tl.store(words + number, tl.sum(tl.where(lanes == accepted, tokens, 0), 0))
            position = words + STRIDE + number
            tl.store(position, tl.load(position) + accepted + 1)
        tl.store(words + 5 * STRIDE + number, 0)


def move_on(table: RoundTable, rows: RoundRows, num_accepted: Tensor, token_ids: Tensor, outcome: Tensor) -> Tensor:
    """See `dspark.ops.rounds.move_on`."""
    words, count, num_rows = table.words, table.words.shape[1], len(rows.offsets)
    kept = torch.empty_like(rows.slots)
    early = early_launch()
    _move[(max(num_rows, count),)](
        words, rows.owners, rows.offsets, rows.slots, rows.counts, num_accepted, token_ids, outcome, kept, num_rows,
        count, words.stride(0), table.width, table.history_len, block_of(1 + table.width),
        block_of(table.history_len, 1), early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return kept


@triton.jit(do_not_specialize=["R"])
def _open(words, slots, limits, R, STRIDE, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < R
    left = tl.load(words + 2 * STRIDE + lanes, mask=inside, other=0) - 1
    left -= tl.load(words + STRIDE + lanes, mask=inside, other=0)
    slot = tl.load(words + 3 * STRIDE + lanes, mask=inside, other=-1)
    asked = tl.load(words + 4 * STRIDE + lanes, mask=inside, other=0)
    tl.store(slots + lanes, tl.where(left > 1, slot, -1), mask=inside)
    tl.store(limits + lanes, tl.maximum(tl.minimum(asked, left - 1), 0), mask=inside)


def open_blocks(table: RoundTable) -> Blocks:
    """See `dspark.ops.rounds.open_blocks`."""
    words, count = table.words, table.words.shape[1]
    slots, limits = aligned_rows(words, 2, count)
    early = early_launch()
    _open[(1,)](words, slots, limits, count, words.stride(0), block_of(count), early, num_warps=1, launch_pdl=early)
    return Blocks(slots, limits)


@triton.jit(do_not_specialize=["ring_rows", "NOISE"])
def _lay_blocks(
    anchors, starts, slots, columns, draws, window, own, ring_rows, NOISE, STRIDE, G: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    block, offset = row // G, row % G
    start = tl.load(starts + block)
    tl.store(columns + row, tl.where(offset == 0, tl.load(anchors + block), NOISE))
    tl.store(columns + STRIDE + row, start + offset)
    place = ring_place(tl.load(slots + block), start + lanes - W, ring_rows)
    tl.store(window + row * W + lanes, place, mask=lanes < W)
    tl.store(own + row * G + lanes, block * G + lanes, mask=lanes < G)
    if offset == 0:
        tl.store(draws + block, start + 1)


def lay_blocks(
    anchors: Tensor, starts: Tensor, slots: Tensor, width: int, noise_id: int, reach: int, ring_rows: int
) -> BlockRows:
    """See `dspark.ops.rounds.lay_blocks`."""
    num_rows, early = len(anchors) * width, early_launch()
    columns, draws = aligned_rows(starts, 2, num_rows), torch.empty_like(starts)
    window, own = starts.new_empty(num_rows, reach), starts.new_empty(num_rows, width)
    _lay_blocks[(num_rows,)](
        anchors, starts, slots, columns, draws, window, own, ring_rows, noise_id, columns.stride(0), width, reach,
        block_of(max(width, reach)), early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return BlockRows._make([*columns, draws, window, own])


@triton.jit
def _keep(
    words, drafts, confidence, verify_lens, proposal, STRIDE, G: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    begin(EARLY)
    number, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lanes < G
    length = tl.load(verify_lens + number)
    drafted = tl.load(drafts + number * G + lanes, mask=inside, other=0)
    bits = tl.load(confidence + number * G + lanes, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tl.store(words + (_SCALARS + lanes) * STRIDE + number, drafted, mask=inside)
    tl.store(words + 5 * STRIDE + number, length)
    report = proposal + number * (1 + 2 * G)
    tl.store(report, length)
    tl.store(report + 1 + lanes, drafted, mask=inside)
    tl.store(report + 1 + G + lanes, bits.to(tl.int64), mask=inside)


def keep_blocks(table: RoundTable, drafts: Tensor, confidence: Tensor, verify_lens: Tensor, proposal: Tensor) -> None:
    """See `dspark.ops.rounds.keep_blocks`."""
    early = early_launch()
    _keep[(len(drafts),)](
        table.words, drafts.contiguous(), confidence.contiguous(), verify_lens, proposal, table.words.stride(0),
        table.width, block_of(table.width), early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
