"""The kernel of products with coded weights, whose values are decoded on their way to the matrix unit."""

import triton
import triton.language as tl

from dspark.ops.packing import CHUNK, RUN, TILE_ROWS, Kind
from dspark.ops.triton.dequantise import fp4_runs, fp8_runs, plain_fp4_runs, plain_fp8_runs
from dspark.ops.triton.early import begin
from dspark.ops.triton.product_blocks import add_products, routed_rows, routed_tile, store_products

_CHUNK, _RUN, _TILE = tl.constexpr(CHUNK), tl.constexpr(RUN), tl.constexpr(TILE_ROWS)
_FP4, _FP8 = tl.constexpr(0), tl.constexpr(1)
KINDS = {Kind.FP4: _FP4, Kind.FP8: _FP8}


@triton.jit
def _side_by_side(left, right, N: tl.constexpr, K: tl.constexpr):
    """[N, 2 K] of two [N, K] tiles; a thread's registers, one after the other."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (N, 2 * K))


@triton.jit
def _load_rows(x, places, lanes, inside):
    """[T, lanes] of the rows that start at `places`."""
    return tl.load(x + (places[:, None] + lanes[None, :]), mask=inside[:, None], other=0.0)


@triton.jit
def _add_runs(w0, w1, w2, w3, x, places, inside, acc, PLAIN: tl.constexpr):
    """Add a chunk to the sums, one run of columns after the other."""
    lanes = tl.arange(0, _RUN)
    acc = add_products(w0, _load_rows(x, places, lanes, inside), acc, PLAIN)
    acc = add_products(w1, _load_rows(x + _RUN, places, lanes, inside), acc, PLAIN)
    acc = add_products(w2, _load_rows(x + 2 * _RUN, places, lanes, inside), acc, PLAIN)
    return add_products(w3, _load_rows(x + 3 * _RUN, places, lanes, inside), acc, PLAIN)


@triton.jit
def _coded_runs(codes, scales, code_places, scale_places, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """A chunk's weights: its four runs of columns, each [N, 32]."""
    lanes = tl.arange(0, _RUN)
    fields = tl.load(scales + scale_places)
    words = tl.load(codes + code_places)
    if KIND == _FP4:
        if PLAIN:
            return plain_fp4_runs(words, tl.load(codes + _partners(code_places, lanes)), fields)
        return fp4_runs(words, fields)
    second_places = code_places + _TILE * _RUN
    more = tl.load(codes + second_places)
    if PLAIN:
        w0, w1 = plain_fp8_runs(words, tl.load(codes + _partners(code_places, lanes)), fields, 0)
        w2, w3 = plain_fp8_runs(more, tl.load(codes + _partners(second_places, lanes)), fields, 2)
    else:
        w0, w1 = fp8_runs(words, fields, 0)
        w2, w3 = fp8_runs(more, fields, 2)
    return w0, w1, w2, w3


@triton.jit
def _partners(places, lanes):
    """Places of the elements that share a 32-bit word with those at `places`."""
    return places + (1 - 2 * (lanes % 2))[None, :]


@triton.jit
def _sum_chunks(
    x, codes, scales, code_places, scale_places, places, inside, more_places, more_inside,
    CHUNKS: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    MORE: tl.constexpr, COLUMNS: tl.constexpr, JOINED: tl.constexpr, STAGES: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Sums [N, rows] over the first `CHUNKS` chunks; the second block of rows only where `MORE`.

    Few rows take a run at a time, which needs the fewest registers; many take whole chunks (`JOINED`), so that the
    matrix unit runs on while the next codes are decoded. Both add the same products in the same order.
    """
    lanes = tl.arange(0, _CHUNK)
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    more = tl.zeros([COLUMNS, MORE if MORE else 16], dtype=tl.float32)
    for _ in tl.range(0, CHUNKS, num_stages=STAGES):
        w0, w1, w2, w3 = _coded_runs(codes, scales, code_places, scale_places, KIND, PLAIN)
        if not JOINED:
            acc = _add_runs(w0, w1, w2, w3, x, places, inside, acc, PLAIN)
            if MORE:
                more = _add_runs(w0, w1, w2, w3, x, more_places, more_inside, more, PLAIN)
        else:
            left, right = _side_by_side(w0, w1, COLUMNS, _RUN), _side_by_side(w2, w3, COLUMNS, _RUN)
            weights = _side_by_side(left, right, COLUMNS, 2 * _RUN)
            acc = add_products(weights, _load_rows(x, places, lanes, inside), acc, PLAIN)
            if MORE:
                more = add_products(weights, _load_rows(x, more_places, lanes, more_inside), more, PLAIN)
        codes += WORDS
        scales += SCALES
        x += _CHUNK
    return acc, more


@triton.jit(do_not_specialize=["T", "P"])
def coded_product(
    x, codes, scales, out, table, sources, targets, T, P,
    N: tl.constexpr, CHUNKS: tl.constexpr, GROUP_ROWS: tl.constexpr, X_WIDTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, ROUTED: tl.constexpr, SECTIONS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr,
    JOINED: tl.constexpr, QUANT_GROUP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Product with coded weights; out is [T or P, N], or [SECTIONS, T or P, N] where sections run side by side."""
    BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    PADDED: tl.constexpr = (N + 127) // 128 * 128
    WORDS: tl.constexpr = _TILE * _RUN * (1 + KIND)
    SCALES: tl.constexpr = (PADDED + SCALE_ROWS - 1) // SCALE_ROWS
    OWN: tl.constexpr = CHUNKS // SECTIONS
    slots = tl.arange(0, ROWS)
    more_slots = ROWS + tl.arange(0, MORE if MORE else 16)
    begin(EARLY)
    if ROUTED:
        block, expert, first, count = routed_tile(table, BLOCKS)
        if count == 0:
            return
        inside = slots < count
        read, written = routed_rows(sources, targets, first + slots, inside)
        more_read = read
        more_inside = inside
        codes += expert * (PADDED * CHUNKS * (WORDS // _TILE))
        scales += expert * (SCALES * CHUNKS)
    else:
        block = tl.program_id(1)
        start = tl.program_id(0).to(tl.int64) * (ROWS + MORE)
        read = start + slots
        inside = read < T
        written = read
        more_read = start + more_slots
        more_inside = more_read < T
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    x += (block * COLUMNS // GROUP_ROWS) * (CHUNKS * _CHUNK)
    code_places = (columns // _TILE) * (CHUNKS * WORDS) + (columns % _TILE) * _RUN
    code_places = code_places[:, None] + tl.arange(0, _RUN)[None, :]
    scale_places = columns // SCALE_ROWS
    if SIDE_BY_SIDE:
        section = tl.program_id(2)
        x += section * (OWN * _CHUNK)
        codes += section * (OWN * WORDS)
        scales += section * (OWN * SCALES)
        out += section.to(tl.int64) * P * N
    acc, more = _sum_chunks(
        x, codes, scales, code_places, scale_places, read * X_WIDTH, inside, more_read * X_WIDTH, more_inside,
        OWN, WORDS, SCALES, KIND, ROWS, MORE, COLUMNS, JOINED, STAGES, PLAIN,
    )  # fmt: skip
    if not SIDE_BY_SIDE:
        for _ in range(1, SECTIONS):
            x += OWN * _CHUNK
            codes += OWN * WORDS
            scales += OWN * SCALES
            next_acc, next_more = _sum_chunks(
                x, codes, scales, code_places, scale_places, read * X_WIDTH, inside, more_read * X_WIDTH, more_inside,
                OWN, WORDS, SCALES, KIND, ROWS, MORE, COLUMNS, JOINED, STAGES, PLAIN,
            )  # fmt: skip
            acc += next_acc
            more += next_more
    store_products(out, written, columns, inside, acc, N, ROWS, COLUMNS, QUANT_GROUP, PLAIN)
    if MORE:
        store_products(out, more_read, columns, more_inside, more, N, MORE, COLUMNS, QUANT_GROUP, PLAIN)
