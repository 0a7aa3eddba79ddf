"""Keyed noise inside kernels: the streams of `dspark.ops.noise`, bit for bit up to the two logarithms."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from dspark.ops.noise import LARGEST_UNIFORM

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-32)
_LARGEST = tl.constexpr(LARGEST_UNIFORM)


@triton.jit
def _mix(x):
    """The SplitMix64 output function of unsigned 64-bit integers."""
    x = (x ^ (x >> 30)) * _MULTIPLIER_1
    x = (x ^ (x >> 27)) * _MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def stream_key(seed, position, stream):
    """Start of the counter sequence of int64 (seed, position, stream), see `dspark.ops.noise.stream_keys`."""
    key = _mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    key = _mix(key + (position.to(tl.uint64, bitcast=True) + 1) * _GOLDEN)
    return _mix(key + (stream.to(tl.uint64, bitcast=True) + 1) * _GOLDEN)


@triton.jit
def uniform(key, counter):
    """float32 strictly inside (0, 1) for an int32 counter from 0."""
    bits = _mix(key + (counter.to(tl.uint64) + 1) * _GOLDEN) >> 32
    return tl.minimum((bits.to(tl.uint32).to(tl.float32) + 0.5) * _UNIT, _LARGEST)


@triton.jit
def gumbel(key, counter, PLAIN: tl.constexpr):
    """Standard Gumbel noise, see `dspark.ops.noise.gumbel_noise`; the interpreter has no log1p of its own."""
    u = uniform(key, counter)
    if PLAIN:
        rest = 1.0 - u.to(tl.float64)
        inner = tl.log(rest) * (u.to(tl.float64) / (1.0 - rest))
        return -tl.log(-inner.to(tl.float32))
    return -libdevice.log(-libdevice.log1p(-u))
