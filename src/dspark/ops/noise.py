"""Counter-based random streams: noise as a pure function of (seed, position, stream, counter).

Nothing here has state, so a draw does not depend on how many draws came before it, on the batch, or
on the device's generator. The integer part is SplitMix64 (Steele, Lea and Flood 2014) in wrap-around
int64 arithmetic; its bits are the same on every device. The logarithms of the Gumbel transform are the
device's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor


def signed_64(value: int) -> int:
    """Return `value` modulo 2**64 as a signed 64-bit integer, the form that torch can hold."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = signed_64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = signed_64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = signed_64(0x94D049BB133111EB)
LARGEST_UNIFORM = 1.0 - 2.0**-24


class Stream(IntEnum):
    """Domains that never share bits. A stream number is `domain + LANE * lane`."""

    TARGET = 0  # Gumbel noise of the token at a position; shared by target and drafter (keyed sampler)
    DRAFT = 1  # Gumbel noise of a draft under the ratio sampler; lane = draft position index
    ACCEPT = 2  # uniforms of the ratio test
    RESIDUAL = 3  # Gumbel noise of the residual or bonus draw of the ratio sampler
    FORCED = 4  # uniforms of forced acceptance


LANE = 8
"""Distance between lanes of one stream; larger than every `Stream` value."""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift of int64 copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The SplitMix64 output function, a bijection of 64-bit integers."""
    x = (x ^ _shift_right(x, 30)).mul_(_MULTIPLIER_1)
    x = (x ^ _shift_right(x, 27)).mul_(_MULTIPLIER_2)
    return x ^ _shift_right(x, 31)


def stream_keys(seeds: Tensor, positions: Tensor, streams: Tensor | int = Stream.TARGET) -> Tensor:
    """Hash (seed, position, stream) to the 64-bit start of a counter sequence.

    Args:
        seeds: [T] int64.
        positions: [T] int64, absolute token positions.
        streams: [T] int64 or one number, see `Stream` and `LANE`.
    Returns:
        [T] int64.
    """
    keys = _mix(seeds + _GOLDEN)
    keys = _mix(keys + (positions + 1) * _GOLDEN)
    if isinstance(streams, int):
        return _mix(keys + signed_64((streams + 1) * _GOLDEN))
    return _mix(keys + (streams + 1) * _GOLDEN)


def random_bits(keys: Tensor, count: int) -> Tensor:
    """Return bits 32..63 of outputs 0..count-1 of each key's sequence: [T, count] int64 in [0, 2**32)."""
    counters = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device)
    return _shift_right(_mix(keys[:, None] + counters * _GOLDEN), 32)


def bits_to_uniform(bits: Tensor) -> Tensor:
    """Map 32 random bits to a float32 strictly inside (0, 1).

    Small values keep all 32 bits of resolution; the largest ones would round to 1 and are clamped below it.
    """
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)


def keyed_uniform(seeds: Tensor, positions: Tensor, stream: Tensor | int, count: int = 1) -> Tensor:
    """Draw `count` uniforms for each (seed, position) in the given stream.

    Returns:
        [T, count] float32, strictly in (0, 1).
    """
    return bits_to_uniform(random_bits(stream_keys(seeds, positions, stream), count))


def gumbel_noise(
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int,
    device: torch.device | str | None = None,
    *,
    streams: Tensor | int = Stream.TARGET,
) -> Tensor:
    """Standard Gumbel noise for every token id: the value at [t, v] depends on (seed, position, stream, v).

    The uniform u enters as -log(-log1p(-u)), so that the upper tail, which decides draws over a large vocabulary, has
    the fine end of the float32 grid: noise spans -2.8 to 22.9.

    Args:
        seeds: [T] int64.
        positions: [T] int64, the position of the token being drawn.
        vocab_size: V; a smaller V is a prefix of a larger one.
        device: where to compute; default the device of `seeds`.
        streams: see `stream_keys`.
    Returns:
        [T, V] float32.
    """
    if device is not None:
        seeds, positions = seeds.to(device), positions.to(device)
        streams = streams.to(device) if isinstance(streams, Tensor) else streams
    uniform = keyed_uniform(seeds, positions, streams, vocab_size)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def seeds_tensor(seeds: Iterable[int], device: torch.device | str | None = None) -> Tensor:
    """Pack Python seeds of any size into an int64 tensor [T], modulo 2**64."""
    return torch.tensor([signed_64(seed) for seed in seeds], dtype=torch.int64, device=device)
