"""The kernel of products with bf16 weights [E, N, K] as they are stored."""

import triton
import triton.language as tl

from dspark.ops.triton.early import begin
from dspark.ops.triton.product_blocks import add_products, routed_rows, routed_tile, store_products


@triton.jit
def _sum_depth(
    x, weight, x_places, weight_places, inside, is_column, lanes,
    DEPTH: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Sums [N, rows] over the first `DEPTH` columns."""
    acc = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in tl.range(0, DEPTH, STEP, num_stages=STAGES):
        if DEPTH % STEP == 0:
            w = tl.load(weight + weight_places, mask=is_column, other=0.0)
            rows = tl.load(x + x_places, mask=inside, other=0.0)
        else:
            known = (start + lanes < DEPTH)[None, :]
            w = tl.load(weight + weight_places, mask=is_column & known, other=0.0)
            rows = tl.load(x + x_places, mask=inside & known, other=0.0)
        acc = add_products(w.to(tl.float32) if PLAIN else w, rows, acc, PLAIN)
        weight += STEP
        x += STEP
    return acc


@triton.jit(do_not_specialize=["T", "P"])
def bf16_product(
    x, weight, out, table, sources, targets, T, P,
    N: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, X_WIDTH: tl.constexpr, ROUTED: tl.constexpr,
    SECTIONS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Product with bf16 weights; out as that of `coded_product`."""
    BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    OWN: tl.constexpr = K // SECTIONS
    slots = tl.arange(0, ROWS)
    begin(EARLY)
    if ROUTED:
        block, expert, first, count = routed_tile(table, BLOCKS)
        if count == 0:
            return
        inside = slots < count
        read, written = routed_rows(sources, targets, first + slots, inside)
        weight += expert * (N * K)
    else:
        block = tl.program_id(1)
        read = tl.program_id(0).to(tl.int64) * ROWS + slots
        inside = read < T
        written = read
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, STEP)
    x += (block * COLUMNS // GROUP_ROWS) * K
    x_places = (read * X_WIDTH)[:, None] + lanes[None, :]
    weight_places = columns.to(tl.int64)[:, None] * K + lanes[None, :]
    is_column = (columns < N)[:, None]
    if SIDE_BY_SIDE:
        section = tl.program_id(2)
        x += section * OWN
        weight += section * OWN
        out += section.to(tl.int64) * P * N
    is_row = inside[:, None]
    acc = _sum_depth(
        x, weight, x_places, weight_places, is_row, is_column, lanes, OWN, STEP, ROWS, COLUMNS, STAGES, PLAIN
    )
    if not SIDE_BY_SIDE:
        for _ in range(1, SECTIONS):
            x += OWN
            weight += OWN
            acc += _sum_depth(
                x, weight, x_places, weight_places, is_row, is_column, lanes, OWN, STEP, ROWS, COLUMNS, STAGES, PLAIN
            )
    store_products(out, written, columns, inside, acc, N, ROWS, COLUMNS, 0, PLAIN)
