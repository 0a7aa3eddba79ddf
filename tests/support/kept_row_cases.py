"""Cases of ops on rows that go from the sums of a product into the state."""

from types import SimpleNamespace

import torch
from torch import Tensor

from dspark.ops.compress import GroupRows, PoolShape
from dspark.ops.kept_rows import RowForm
from dspark.ops.opset import OpSet
from dspark.ops.rope import rope_frequencies
from support import naive_ops as naive
from support.op_case import OpCase, Rows, fixed, normal


def kept_row_cases() -> list[OpCase]:
    """Rows on their way from the sums of a product into the state."""
    freqs = rope_frequencies(8, 10000.0, None)
    none, bf16 = RowForm("none", 0), torch.bfloat16
    query, key = SimpleNamespace(weight=fixed(17, 40), eps=1e-6), SimpleNamespace(weight=fixed(18, 24), eps=1e-5)

    def sums(g: torch.Generator, T: int) -> Rows:
        return normal(g, T, 3, 64), torch.randint(0, 5000, (T,), generator=g)

    def latents(ops: OpSet, parts: Tensor, positions: Tensor, dtype: torch.dtype, form: RowForm) -> Rows:
        parts, turn = parts.transpose(0, 1), ops.rotations(positions, freqs)
        alone = ops.key_rows(parts, 40, dtype, key, turn, form, None)
        return *ops.latents(parts, dtype, (query, form), (key, form), turn, None), alone

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
