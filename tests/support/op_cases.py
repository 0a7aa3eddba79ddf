"""Every op of the model as rows in, rows out, with a naive double-precision version beside it.

A case draws the inputs of T rows, calls one op on them, and knows what the op means. What is not a row (weights,
stores) is fixed by the case and lies on the device for which the cases were made. A further set of twins is held to
the same rules by adding it to `support.op_sets`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from dspark.ops.compress import GroupRows, PoolShape
from dspark.ops.draw import DrawKind
from dspark.ops.elementwise import sigmoid, silu, softplus
from dspark.ops.engram import hash_ngrams
from dspark.ops.experts import Output
from dspark.ops.hyper import Residual, StreamMix, head_mix
from dspark.ops.index import IndexKeys, candidate_rows
from dspark.ops.kept_rows import RowForm
from dspark.ops.opset import OpSet
from dspark.ops.rope import rope_frequencies
from dspark.ops.route import Route
from support import draw_cases as draws
from support import naive_ops as naive

Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class OpCase:
    """One op on rows.

    Attributes:
        make: generator, T -> inputs, each with T rows.
        call: twins, inputs -> outputs, each with T rows.
        naive: inputs -> what the outputs should be, in double precision; None where a test of its own says more.
        tolerance: largest error relative to 1 + |value|.
    """

    name: str
    make: Callable[[torch.Generator, int], Rows]
    call: Callable[..., Rows]
    naive: Callable[..., Rows] | None = None
    tolerance: float = 2e-5

    def __str__(self) -> str:
        return self.name


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu")


def fixed(seed: int, *shape: int) -> Tensor:
    """What all rows share: the same numbers in every call, on the device for which the cases are made."""
    return normal(torch.Generator().manual_seed(seed), *shape).to(torch.get_default_device())


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


def experts_case(experts: int, count: int, held: range | None = None) -> OpCase:
    """`held` are the experts whose weights the op is given; the others then add nothing."""
    w13, w2 = fixed(5, experts, 2 * 24, 40) * 0.3, fixed(6, experts, 40, 24) * 0.3
    s13, s2 = fixed(13, 2 * 24, 40) * 0.3, fixed(14, 40, 24) * 0.3

    def naive_mixture(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        beside = torch.zeros(x.shape[0], 1, dtype=torch.int64), torch.ones(x.shape[0], 1)
        shared = naive.routed_experts(x, *beside, s13.unsqueeze(0), s2.unsqueeze(0), 2.0, 8)
        here = weights if held is None else weights * ((ids >= held.start) & (ids < held.stop))
        return naive.routed_experts(x, ids, here, w13, w2, 2.0, 8) + shared

    stacks = (w13, w2) if held is None else (w13[held.start : held.stop], w2[held.start : held.stop])

    def mixture(ops: OpSet, x: Tensor, route: Route) -> Output:
        numbers = 2.0, lambda y: ops.quantise_fp8(y, 8), 8
        return ops.mixture(x, route, stacks, ops.shared_expert(x, (s13, s2), *numbers), *numbers)

    def make(g: torch.Generator, T: int) -> Rows:
        chosen = torch.rand(T, experts, generator=g).argsort(-1)[:, :count]
        return normal(g, T, 40), chosen, torch.rand(T, count, generator=g)

    return OpCase(
        f"mixture {count} of {experts}" + (f", held {held.start} to {held.stop - 1}" if held else ""),
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


def quantise_case(field: str, group: int, reference: Callable[[Tensor, int], Tensor], size: float) -> OpCase:
    return OpCase(
        f"{field} {group} x{size:g}",
        lambda g, T: (normal(g, T, 3 * group) * size * torch.randn(T, 1, generator=g).exp(),),
        lambda ops, x: (getattr(ops, field)(x, group),),
        lambda x: (reference(x, group),),
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


def kept_row_cases() -> list[OpCase]:
    """Rows on their way from the sums of a product into the state."""
    freqs = rope_frequencies(8, 10000.0, None)
    none, bf16 = RowForm("none", 0), torch.bfloat16
    query, key = SimpleNamespace(weight=fixed(17, 40), eps=1e-6), SimpleNamespace(weight=fixed(18, 24), eps=1e-5)

    def sums(g: torch.Generator, T: int) -> Rows:
        return normal(g, T, 3, 64), torch.randint(0, 5000, (T,), generator=g)

    def latents(ops: OpSet, parts: Tensor, positions: Tensor, dtype: torch.dtype, form: RowForm) -> Rows:
        parts, turn = parts.transpose(0, 1), ops.rotations(positions, freqs)
        alone = ops.key_rows(parts, 40, dtype, key, turn, form)
        return *ops.latents(parts, dtype, (query, form), (key, form), turn), alone

    def naive_latents(parts: Tensor, positions: Tensor) -> Rows:
        total = parts.double().sum(1)
        latent = naive.rms_norm(total[:, :40], query.weight, query.eps)
        rows = naive.apply_rope(naive.rms_norm(total[:, 40:], key.weight, key.eps), positions, freqs)
        return latent, rows, rows

    def formed(ops: OpSet, x: Tensor, positions: Tensor) -> Rows:
        turn = ops.rotations(positions, freqs)
        forms = RowForm("none", 0, hadamard=True), RowForm("fp8", 8, skip=8), RowForm("fp4", 16, hadamard=True)
        return tuple(ops.form_rows(x.to(bf16), turn, form) for form in (*forms, RowForm("fp4_e4m3", 4)))

    return [
        OpCase("latents", sums, lambda ops, x, p: latents(ops, x, p, torch.float32, none), naive_latents, 1e-4),
        OpCase("latents bf16", sums, lambda ops, x, p: latents(ops, x, p, bf16, none), naive_latents, 3e-2),
        OpCase("latents fp8", sums, lambda ops, x, p: latents(ops, x, p, bf16, RowForm("fp8", 8))),
        OpCase("forms", lambda g, T: (normal(g, T, 3, 32), torch.randint(0, 5000, (T,), generator=g)), formed),
        compress_case("plain", PoolShape(2, 16, 4, False, True), torch.float32, none),
        compress_case("overlap", PoolShape(3, 16, 4, True, True), torch.float32, none),
        compress_case("bf16", PoolShape(0, 16, 4, True, True), bf16, none),
        compress_case("fp4", PoolShape(0, 16, 4, True, True), bf16, RowForm("fp4", 8, hadamard=True), has_naive=False),
        compress_case("token", PoolShape(1, 16, 1, False, False), torch.float32, none),
    ]


def compress_case(name: str, shape: PoolShape, dtype: torch.dtype, form: RowForm, has_naive: bool = True) -> OpCase:
    """Each row is the last member of a group of its own; the others are in the tail, and the first may be missing."""
    freqs, bias = rope_frequencies(8, 10000.0, None), fixed(19, shape.ratio, shape.projected)
    norm, reach, num_kept = SimpleNamespace(weight=fixed(20, shape.width), eps=1e-6), shape.reach, 30
    tail, columns = fixed(21, num_kept, 2 * shape.projected), shape.column + 2 * shape.projected + 1

    def make(g: torch.Generator, T: int) -> Rows:
        groups = torch.randint(0, 900, (T,), generator=g)
        members = torch.rand(T, num_kept, generator=g).argsort(-1)[:, :reach]
        return (
            normal(g, T, 2, columns),
            groups,
            members.masked_fill(torch.arange(reach) < reach // 2 * (groups % 2).unsqueeze(1), -1),
        )

    def call(ops: OpSet, parts: Tensor, groups: Tensor, members: Tensor) -> Rows:
        count, first = parts.shape[0], groups * shape.ratio
        found = []
        for at_once in (True, False):
            own = torch.arange(count, device=parts.device)
            joined = torch.cat((tail, tail.new_zeros(count, tail.shape[1])))
            members = torch.cat((members[:, :-1], (joined.shape[0] + own).unsqueeze(1)), dim=1)
            store = torch.empty(count, shape.width, dtype=dtype, device=parts.device)
            rows = GroupRows(first, first + shape.ratio - 1, store, own, joined, num_kept + own, members, at_once)
            latent = ops.compress(
                parts.transpose(0, 1), dtype, shape, bias, norm, ops.rotations(first, freqs), form, rows
            )
            found += [latent, store, joined[num_kept:]]
        return tuple(found)

    def naive_compress(parts: Tensor, groups: Tensor, members: Tensor) -> Rows:
        values, gates = parts.double().sum(1)[:, shape.column : -1].chunk(2, dim=-1)
        kept = (
            torch.cat((values, gates + bias[-1].double()), dim=-1)
            if shape.is_gated
            else values.new_zeros(len(values), 2 * shape.projected)
        )
        pooled = []
        for row in range(len(values)):
            inputs = torch.cat((tail[members[row, :-1].clamp(min=0)].double(), kept[row : row + 1]))
            halves = inputs.view(reach, 2, -1, shape.width)
            own = halves[torch.arange(reach), :, torch.arange(reach) // shape.ratio]
            missing = torch.cat((members[row, :-1] < 0, torch.tensor([False])))
            weights = own[:, 1].masked_fill(missing.unsqueeze(-1), float("-inf")).softmax(0)
            pooled.append((weights * own[:, 0]).sum(0) if shape.is_gated else values[row])
        latent = naive.rms_norm(torch.stack(pooled), norm.weight, norm.eps)
        return (latent, naive.apply_rope(latent, groups * shape.ratio, freqs), kept) * 2

    return OpCase(
        f"compress {name}",
        make,
        call,
        naive_compress if has_naive else None,
        tolerance=1e-4 if dtype == torch.float32 else 3e-2,
    )


def hyper_cases(size: int, width: int) -> list[OpCase]:
    """The ops of hyper-connections with `size` streams."""
    scale, base, weight = fixed(8, 3), fixed(9, (2 + size) * size), fixed(10, size, width)
    other = fixed(18, size, width)
    fn, norm_weight = fixed(15, (2 + size) * size, size * width), fixed(16, width)
    group = 4 if width % 4 == 0 else 0
    numbers = 7, 1e-6, 1e-5, 1e-6, group

    def rows(g: torch.Generator, T: int) -> Rows:
        pending = normal(g, T, width), torch.rand(T, size, generator=g), torch.rand(T, size, size, generator=g)
        return normal(g, T, size, width), torch.rand(T, size, generator=g), *pending

    def read(ops: OpSet, streams: Tensor, carried: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Rows:
        """Whole streams and pending ones; own pre-weights and carried ones; the last collapse."""
        whole = Residual(streams, carried)
        pending = Residual(streams, carried, (output, StreamMix(carried, post, comb)))
        own = ops.read_streams(whole, False, fn, scale, base, norm_weight, *numbers)
        shifted = ops.read_streams(pending, True, fn, scale, base, norm_weight, *numbers)
        head = ops.read_head(own.leave(output), fn[:size], scale[:1], base[:size], norm_weight, *numbers[1:4])
        collapsed = ops.collapse_streams(streams, carried)
        return own.x, *own.mix, shifted.x, shifted.streams, *shifted.mix, *head, collapsed

    def quantised(ops: OpSet, *inputs: Tensor) -> Rows:
        """The quantised input is that of the raw one; both are given, for rows near a boundary."""
        half = ops.read_streams(Residual(*inputs[:2]), False, fn, scale, base, norm_weight, *numbers)
        again = ops.quantise_fp8(half.x, group) if group else half.x
        return half.quantised, half.quantised - again

    def naive_read(streams: Tensor, carried: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Rows:
        def logits(streams: Tensor, fn: Tensor) -> Tensor:
            flat = streams.double().flatten(1)
            return (flat @ fn.double().t()) * (flat.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

        def read(streams: Tensor, pre: Tensor | None) -> Rows:
            mix = naive.mix_streams(logits(streams, fn), scale, base, size, 7, 1e-6)
            x = naive.collapse_streams(streams, mix[0] if pre is None else pre)
            return naive.rms_norm(x, norm_weight, 1e-6), *mix

        own = read(streams, None)
        written = naive.expand_streams(output, streams, (carried, post, comb))
        shifted, *shifted_mix = read(written, carried)
        last = naive.expand_streams(output, streams, (own[1], own[2], own[3]))
        pre = naive.sigmoid(logits(last, fn[:size]) * scale[0] + base[:size]) + 1e-6
        hidden = naive.collapse_streams(last, pre)
        head = hidden, naive.rms_norm(hidden, norm_weight, 1e-6)
        return *own, shifted, written, *shifted_mix, *head, naive.collapse_streams(streams, carried)

    def naive_add(streams: Tensor, projected: Tensor) -> Rows:
        keys, value = projected[:, : size * width].unflatten(1, (size, width)), projected[:, size * width :]
        gate = naive.engram_gate(streams, keys, weight.double() * other.double(), 1e-6)
        return (streams.double() + gate.unsqueeze(-1) * value.double().unsqueeze(1),)

    return [
        OpCase(f"read, expand, collapse S{size} D{width}", rows, read, naive_read, tolerance=1e-4),
        OpCase(f"quantised input S{size} D{width}", rows, quantised),
        OpCase(
            f"embed_streams S{size} D{width}",
            lambda g, T: (torch.randint(0, size, (T,), generator=g),),
            lambda ops, ids: (ops.embed_streams(weight, ids, size, torch.float32),),
            lambda ids: (weight[ids].unsqueeze(1).repeat(1, size, 1),),
            tolerance=0.0,
        ),
        OpCase(
            f"head_mix S{size}",
            lambda g, T: (normal(g, T, size),),
            lambda ops, x: (head_mix(x, scale[:1], base[:size], 1e-6),),
            lambda x: (naive.sigmoid(x.double() * scale[0] + base[:size]) + 1e-6,),
        ),
        OpCase(
            f"engram_add S{size} D{width}",
            lambda g, T: (normal(g, T, size, width), normal(g, T, (size + 1) * width)),
            lambda ops, streams, projected: (ops.engram_add(streams, projected, weight, other, 1e-6),),
            naive_add,
        ),
    ]


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
        experts_case(5, 2, held=range(2, 4)),
        experts_case(9, 4),
        index_case(3, 64),
        index_case(7, 192),
        *(
            quantise_case(field, group, reference, size)
            for field, group, reference in (
                ("quantise_fp8", 32, naive.quantise_fp8),
                ("quantise_fp4", 32, naive.quantise_fp4),
                ("quantise_fp4_e4m3", 16, naive.quantise_fp4_e4m3),
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
            "gate_and_up",
            lambda g, T: (normal(g, T, 2 * 23) * 3,),
            lambda ops, x: (ops.gate_and_up(x, 2.0), ops.gate_and_up(x, 0.0)),
            lambda x: (naive.gate_and_up(x, 2.0), naive.gate_and_up(x, 0.0)),
        ),
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
