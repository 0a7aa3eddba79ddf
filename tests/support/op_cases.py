"""Every op of the model as rows in, rows out, with a naive double-precision version beside it.

A case draws the inputs of T rows, calls one op on them, and knows what the op means. What is not a row (weights,
stores) is fixed by the case and lies on the device for which the cases were made. A further set of twins is held to
the same rules by adding it to `support.op_sets`.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dspark.ops.draw import DrawKind
from dspark.ops.elementwise import sigmoid, silu, softplus
from dspark.ops.engram import hash_ngrams
from dspark.ops.experts import Output
from dspark.ops.index import IndexKeys, candidate_rows
from dspark.ops.kept_rows import RowForm
from dspark.ops.opset import OpSet
from dspark.ops.rope import rope_frequencies
from dspark.ops.route import Route
from support import draw_cases as draws
from support import naive_ops as naive
from support.kept_row_cases import kept_row_cases
from support.op_case import OpCase, Rows, fixed, normal
from support.stream_cases import hyper_cases


def linear_case(depth: int, width: int, dtype: torch.dtype = torch.float32) -> OpCase:
    weight = fixed(1, width, depth) * depth**-0.5
    return OpCase(
        f"linear {depth}x{width} {str(dtype)[6:]}",
        lambda g, T: (normal(g, T, depth).to(dtype),),
        lambda ops, x: (ops.linear(x, weight),),
        lambda x: (x.double() @ weight.double().t(),),
        tolerance=2e-5 if dtype == torch.float32 else 8e-3,
    )


def attention_case(
    heads: int, width: int, window: int, picks: int, dtype: torch.dtype = torch.float32, norm_eps: float | None = None
) -> OpCase:
    """Two stores; some keys are missing, row 0 of each store is nobody's and is not a number."""
    near, far, sink = fixed(2, 90, width), fixed(3, 120, width), fixed(4, heads)
    near[0], far[0] = float("nan"), float("inf")
    near, far = near.to(dtype), far.to(dtype)
    scale, freqs = width**-0.5, rope_frequencies(8, 10000.0, None)

    def index(g: torch.Generator, T: int, count: int, rows: int) -> Tensor:
        chosen = torch.rand(T, rows - 1, generator=g).argsort(-1)[:, :count] + 1
        missing = torch.rand(T, count, generator=g) < 0.3
        return chosen.masked_fill(missing, -1)

    def make(g: torch.Generator, T: int) -> Rows:
        keys = index(g, T, window, 90), index(g, T, picks, 120)
        return normal(g, T, heads, width).to(dtype), *keys, torch.randint(0, 5000, (T,), generator=g)

    def call(ops: OpSet, q: Tensor, a: Tensor, b: Tensor, positions: Tensor) -> Rows:
        return (ops.attend(q, ops.rotations(positions, freqs), [(near, a), (far, b)], sink, scale, norm_eps),)

    def naive_attend(q: Tensor, a: Tensor, b: Tensor, positions: Tensor) -> Rows:
        if norm_eps is not None:
            q = naive.rms_norm(q, None, norm_eps)
        found = naive.sparse_attention(naive.apply_rope(q, positions, freqs), [(near, a), (far, b)], sink, scale)
        return (naive.apply_rope(found, -positions, freqs),)

    return OpCase(
        f"attend H{heads} K{width} {window}+{picks} {str(dtype)[6:]} {norm_eps}",
        make,
        call,
        naive_attend,
        tolerance=1e-4 if dtype == torch.float32 else 2e-2,  # of angles up to 5,000 radians in float32
    )


def experts_case(experts: int, count: int, held: range | None = None, limit: float = 2.0) -> OpCase:
    """`held` are the experts whose weights the op is given; the others then add nothing."""
    w13, w2 = fixed(5, experts, 2 * 24, 40) * 0.3, fixed(6, experts, 40, 24) * 0.3
    s13, s2 = fixed(13, 2 * 24, 40) * 0.3, fixed(14, 40, 24) * 0.3

    def naive_mixture(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        beside = torch.zeros(x.shape[0], 1, dtype=torch.int64), torch.ones(x.shape[0], 1)
        shared = naive.routed_experts(x, *beside, s13.unsqueeze(0), s2.unsqueeze(0), limit, 8)
        here = weights if held is None else weights * ((ids >= held.start) & (ids < held.stop))
        return naive.routed_experts(x, ids, here, w13, w2, limit, 8) + shared

    stacks = (w13, w2) if held is None else (w13[held.start : held.stop], w2[held.start : held.stop])

    def mixture(ops: OpSet, x: Tensor, route: Route) -> Output:
        numbers = limit, lambda y: ops.quantise_fp8(y, 8), 8
        return ops.mixture(x, route, stacks, ops.shared_expert(x, (s13, s2), *numbers), *numbers)

    def make(g: torch.Generator, T: int) -> Rows:
        chosen = torch.rand(T, experts, generator=g).argsort(-1)[:, :count]
        return normal(g, T, 40), chosen, torch.rand(T, count, generator=g)

    return OpCase(
        f"mixture {count} of {experts} under {limit:g}" + (f", held {held.start} to {held.stop - 1}" if held else ""),
        make,
        lambda ops, x, ids, weights: (ops.sum_terms(mixture(ops, x, Route(ids, weights, held))),),
        None if count > 2 else lambda x, ids, weights: (naive_mixture(x, ids, weights),),
        tolerance=2e-3,
    )


def index_case(heads: int, rows: int) -> OpCase:
    keys, places = fixed(7, rows, 32), torch.arange(rows).unsqueeze(0)

    def call(ops: OpSet, q: Tensor, w: Tensor) -> Rows:
        owners = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
        return (ops.index_scores(q, w.transpose(0, 1), 1, IndexKeys(keys, places, owners)),)

    return OpCase(
        f"index_scores H{heads} C{rows}",
        lambda g, T: (normal(g, T, heads, 32), normal(g, T, 2, heads + 2)),
        call,
        lambda q, w: (naive.index_scores(q, w.double().sum(1)[:, 1:-1] * (32 * heads) ** -0.5, keys),),
    )


def quantise_case(kind: str, group: int, reference: Callable[[Tensor, int], Tensor], size: float) -> OpCase:
    """Quantisers as the form of rows that are not turned; the one that stands in front of products also by itself."""

    def call(ops: OpSet, x: Tensor) -> Rows:
        still = torch.ones(len(x), 2, device=x.device), torch.zeros(len(x), 2, device=x.device)
        formed = ops.form_rows(x, still, RowForm(kind, group))
        return formed, ops.quantise_fp8(x, group) if kind == "fp8" else formed

    return OpCase(
        f"quantise {kind} {group} x{size:g}",
        lambda g, T: (normal(g, T, 3 * group) * size * torch.randn(T, 1, generator=g).exp(),),
        call,
        lambda x: (reference(x, group),) * 2,
        tolerance=0.0,
    )


def rope_case(heads: int | None) -> OpCase:
    freqs = rope_frequencies(12, 10000.0, None)
    shape = (20,) if heads is None else (heads, 20)

    def call(ops: OpSet, x: Tensor, positions: Tensor) -> Rows:
        return (ops.form_rows(x, ops.rotations(positions, freqs), RowForm("none", 0)),)

    return OpCase(
        f"rope heads {heads}",
        lambda g, T: (normal(g, T, *shape), torch.randint(0, 100_000, (T,), generator=g)),
        call,
        lambda x, positions: (naive.apply_rope(x, positions, freqs),),
        tolerance=1e-4,  # of angles up to 100,000 radians in float32
    )


def selection_cases() -> list[OpCase]:
    """Choices of experts and of compressed rows; scores are coarse, so that there are many ties."""

    def coarse(g: torch.Generator, *shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=g).float()

    def naive_candidate(scores: Tensor, some: Tensor) -> Tensor:
        columns = some[: scores.shape[0]].nonzero().flatten()
        picks = naive.pick_rows(scores[columns].unsqueeze(0), torch.tensor([columns.shape[0]]), 6)[0]
        return torch.where(picks < 0, -1, columns[picks])

    bias, gate, table = fixed(11, 9).round(), torch.eye(9), fixed(17, 20, 9).argsort(-1)[:, :3].contiguous()
    return [
        OpCase(
            "route of tied experts",
            lambda g, T: (coarse(g, T, 9),),
            lambda ops, x: ops.route_rows(x, gate, torch.zeros_like(bias), None, 4, True, 1e-20, 1.5)[:2],
            lambda logits: naive.route(logits, torch.zeros(9), 4, 1e-20, 1.5),
        ),
        OpCase(
            "route to given experts",
            lambda g, T: (normal(g, T, 9) * 30, torch.randint(0, 20, (T,), generator=g)),
            lambda ops, x, tokens: ops.route_rows(x, gate, None, (table, tokens), 3, False, 1e-20, 1.5)[:2],
            lambda x, tokens: (table[tokens], 1.5 * naive.softplus(x.double()).sqrt().gather(1, table[tokens])),
        ),
        OpCase(
            "pick_rows",
            lambda g, T: (coarse(g, T, 37), torch.randint(0, 38, (T,), generator=g)),
            lambda ops, scores, visible: (ops.pick_rows(scores, visible, None, 6),),
            lambda scores, visible: (naive.pick_rows(scores, visible, 6),),
            tolerance=0.0,
        ),
        OpCase(
            "pick_rows of candidates",
            lambda g, T: (coarse(g, T, 37), torch.rand(T, 40, generator=g) < 0.4),
            lambda ops, scores, some: (ops.pick_rows(scores, 0 * some[:, 0].long() + 37, some, 6),),
            lambda scores, some: (torch.stack([naive_candidate(*row) for row in zip(scores, some, strict=True)]),),
            tolerance=0.0,
        ),
        OpCase(
            "pick_rows of many",
            lambda g, T: (normal(g, T, 2500).mul(50).round(), torch.randint(0, 2501, (T,), generator=g)),
            lambda ops, scores, visible: (ops.pick_rows(scores, visible, None, 300),),
            lambda scores, visible: (naive.pick_rows(scores, visible, 300),),
            tolerance=0.0,
        ),
        OpCase(
            "candidate_rows",
            lambda g, T: (coarse(g, T, 37), torch.randint(0, 38, (T,), generator=g)),
            lambda ops, scores, visible: (candidate_rows(scores, visible, 4, 3),),
            lambda scores, visible: (naive.candidate_rows(scores, visible, 4, 3),),
            tolerance=0.0,
        ),
        OpCase(
            "route weights",
            lambda g, T: (normal(g, T, 9) * 4,),
            lambda ops, x: ops.route_rows(x, gate, bias, None, 3, True, 1e-20, 1.5)[:2],
            lambda logits: naive.route(logits, bias, 3, 1e-20, 1.5),
        ),
    ]


def draw_cases() -> list[OpCase]:
    """Draws, verdicts and confidences; tokens are compared as they are."""

    def rows_of(kind: DrawKind, width: int) -> OpCase:
        return OpCase(
            f"draw_rows {kind.name.lower()} V{width}",
            lambda g, T: draws.draw_inputs(kind, g, T, width),
            lambda ops, *rows: draws.draw_tokens(ops, kind, *rows),
            draws.on_torch(draws.draw_tokens, kind),
        )

    def blocks_of(kind: DrawKind) -> OpCase:
        return OpCase(
            f"draw_blocks {kind.name.lower()}",
            lambda g, T: draws.block_inputs(kind, g, T),
            lambda ops, *rows: draws.draw_blocks(ops, kind, *rows),
            draws.on_torch(draws.draw_blocks, kind),
        )

    return [
        OpCase(
            "best_tokens",
            lambda g, T: (draws.logits_of(g, T, 2100),),
            lambda ops, logits: (ops.best_tokens(logits[:, :2050]),),
            lambda logits: (logits[:, :2050].argmax(-1),),
        ),
        *(rows_of(kind, width) for kind in DrawKind for width in (3, 1100)),
        *(blocks_of(kind) for kind in DrawKind),
        OpCase("judge_drafts", draws.verdict_inputs, draws.judge, draws.on_torch(draws.judge)),
        OpCase(
            "confidence_logits",
            lambda g, T: (normal(g, T, 70), torch.randint(0, 9, (T,), generator=g)),
            draws.confidence,
            draws.naive_confidence,
        ),
    ]


def norm_case(size: int, dtype: torch.dtype) -> OpCase:
    weight = fixed(12, size)
    return OpCase(
        f"rms_norm {size} {str(dtype)[6:]}",
        lambda g, T: (normal(g, T, size).to(dtype),),
        lambda ops, x: (ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x, None, 1e-6)),
        lambda x: (naive.rms_norm(x, weight, 1e-6), naive.rms_norm(x, None, 1e-6)),
        tolerance=1e-5 if dtype == torch.float32 else 8e-3,
    )


def elementwise_case(function: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], size: int) -> OpCase:
    return OpCase(
        f"{function.__name__} {size}",
        lambda g, T: (normal(g, T, size) * 8,),
        lambda ops, x: (function(x),),
        lambda x: (reference(x.double()),),
    )


@cache
def cases_on(device: str) -> list[OpCase]:
    """All cases, with what they fix on one device."""
    with torch.device(device):
        return _cases()


def _cases() -> list[OpCase]:
    multipliers = torch.tensor([7919, 104729, 1299709])
    primes = torch.tensor([[11, 13], [17, 19]])
    offsets = torch.tensor([[0, 11], [24, 41]])
    return [
        *(
            linear_case(depth, width)
            for depth, width in ((64, 48), (33, 7), (1, 1), (640, 1), (4, 16), (96, 257), (513, 130), (640, 1024))
        ),
        linear_case(64, 48, torch.bfloat16),
        linear_case(33, 7, torch.bfloat16),
        attention_case(1, 16, 8, 3),
        attention_case(3, 32, 8, 5),
        attention_case(7, 24, 61, 70, norm_eps=1e-6),
        attention_case(5, 96, 64, 64, torch.bfloat16, norm_eps=1e-6),
        experts_case(5, 2),
        experts_case(3, 1),
        experts_case(3, 2, limit=0.0),
        experts_case(5, 2, held=range(2, 4)),
        experts_case(9, 4),
        index_case(3, 64),
        index_case(7, 192),
        *(
            quantise_case(kind, group, reference, size)
            for kind, group, reference in (
                ("fp8", 32, naive.quantise_fp8),
                ("fp4", 32, naive.quantise_fp4),
                ("fp4_e4m3", 16, naive.quantise_fp4_e4m3),
            )
            for size in (1e-7, 1.0, 300.0)
        ),
        *(
            norm_case(size, dtype)
            for size, dtype in ((1, torch.float32), (37, torch.float32), (1000, torch.float32), (64, torch.bfloat16))
        ),
        rope_case(None),
        rope_case(3),
        *kept_row_cases(),
        OpCase(
            "mean_streams",
            lambda g, T: (normal(g, T, 3, 19),),
            lambda ops, x: (ops.mean_streams(x),),
            lambda x: (x.double().mean(1),),
        ),
        OpCase(
            "sum_parts",
            lambda g, T: (normal(g, T, 3, 19), normal(g, T, 3, 19).bfloat16()),
            lambda ops, x, y: (ops.sum_parts(x.transpose(0, 1)), ops.sum_parts(y.transpose(0, 1))),
            lambda x, y: (x.double().sum(1), y.double().sum(1)),
            tolerance=8e-3,
        ),
        *hyper_cases(4, 33),
        *hyper_cases(3, 64),
        *selection_cases(),
        *draw_cases(),
        *(elementwise_case(sigmoid, naive.sigmoid, size) for size in (1, 13)),
        *(elementwise_case(silu, lambda x: x * naive.sigmoid(x), size) for size in (1, 13)),
        *(elementwise_case(softplus, naive.softplus, size) for size in (1, 13)),
        OpCase(
            "hash_ngrams",
            lambda g, T: (torch.randint(0, 500, (T, 3), generator=g),),
            lambda ops, ngrams: (hash_ngrams(ngrams, multipliers, primes, offsets),),
            lambda ngrams: (naive.hash_ngrams(ngrams, multipliers, primes, offsets),),
            tolerance=0.0,
        ),
    ]
