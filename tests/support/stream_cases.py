"""Cases of ops on residual streams."""

import torch
from torch import Tensor

from dspark.ops.hyper import Residual, StreamMix, head_mix
from dspark.ops.opset import OpSet
from support import naive_ops as naive
from support.op_case import OpCase, Rows, fixed, normal


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
