"""Noise is a pure function of (seed, position, stream, token id) with frozen bits.

Every sampled text depends on these bits: a change here changes the output of every seed, so the table below may only
change together with a note to users. Not tested: the quality of SplitMix64 itself beyond coarse statistics.
"""

import math

import pytest
import torch
from scipy import stats

from dspark.ops.noise import LANE, bits_to_uniform, random_bits, seeds_tensor, stream_keys
from dspark.sampling import Stream, gumbel_noise, keyed_uniform

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64's output function on Python integers."""
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def plain_bits(seed: int, position: int, stream: int, counter: int) -> int:
    """The stream's definition, one value at a time."""
    key = mix(mix(mix(seed + GOLDEN) + (position + 1) * GOLDEN) + (stream + 1) * GOLDEN)
    return mix(key + (counter + 1) * GOLDEN) >> 32


FROZEN = {
    (0, 0, 0): [556823690, 214405049, 2879038426, 2965852328],
    (7, 1000, 0): [1544700342, 1232986731, 2804305509, 4239846673],
    (2**64 - 1, 3, 2): [3841190178, 4283449105, 993498529, 3045286416],
    (2**63, 131071, 1 + 5 * 8): [52830317, 573071461, 1784116972, 1423819706],
}


@pytest.mark.parametrize("key", FROZEN)
def test_bits_are_frozen(key):
    seed, position, stream = key
    keys = stream_keys(seeds_tensor([seed]), torch.tensor([position]), stream)
    assert random_bits(keys, 4)[0].tolist() == FROZEN[key]


def test_bits_equal_the_definition_at_any_length():
    seeds, positions, streams = [0, 1, 2**64 - 1, 12345], [0, 5, 99, 2**20], [0, 3, 41, 1]
    keys = stream_keys(seeds_tensor(seeds), torch.tensor(positions), torch.tensor(streams))
    for count in (1, 7, 33):
        expected = [
            [plain_bits(*key, counter) for counter in range(count)]
            for key in zip(seeds, positions, streams, strict=True)
        ]
        assert random_bits(keys, count).tolist() == expected


def test_first_outputs_are_splitmix64():
    assert random_bits(torch.zeros(1, dtype=torch.int64), 2).tolist() == [[0xE220A839, 0x6E789E6A]]


def test_uniform_stays_strictly_inside_the_unit_interval():
    extremes = torch.tensor([0, 1, 2**31, 2**32 - 200, 2**32 - 1])
    uniform = bits_to_uniform(extremes)
    assert uniform.dtype == torch.float32
    assert (uniform > 0).all()
    assert (uniform < 1).all()
    assert (uniform.diff() >= 0).all()
    assert uniform[0].item() == 2.0**-33


def test_noise_is_finite_and_a_larger_vocabulary_extends_a_smaller_one():
    seeds, positions = torch.arange(20), torch.arange(20) * 37
    large = gumbel_noise(seeds, positions, 5000)
    assert torch.isfinite(large).all()
    for vocab_size in (1, 3, 17, 4999):
        assert torch.equal(gumbel_noise(seeds, positions, vocab_size), large[:, :vocab_size])


def test_a_row_does_not_depend_on_the_rows_beside_it():
    seeds, positions = torch.arange(37) % 5, torch.arange(37)
    together = gumbel_noise(seeds, positions, 129)
    for t in (0, 1, 17, 36):
        assert torch.equal(gumbel_noise(seeds[t : t + 1], positions[t : t + 1], 129)[0], together[t])


def test_streams_lanes_seeds_and_positions_do_not_share_bits():
    domains = [int(stream) + LANE * lane for stream in Stream for lane in range(3)]
    assert len(set(domains)) == len(domains)
    keys = {
        stream_keys(torch.tensor([seed]), torch.tensor([position]), domain).item()
        for seed in range(8)
        for position in range(8)
        for domain in domains
    }
    assert len(keys) == 64 * len(domains)


def test_uniform_and_gumbel_have_their_distributions():
    seeds, positions = torch.zeros(100, dtype=torch.int64), torch.arange(100)
    uniform = keyed_uniform(seeds, positions, Stream.ACCEPT, 500).flatten().double().numpy()
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    noise = gumbel_noise(seeds, positions, 500).double()
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    assert noise.mean().item() == pytest.approx(0.5772, abs=4 * math.pi / math.sqrt(6 * noise.numel()))
    # Neighbouring positions and neighbouring tokens are uncorrelated.
    flat = noise - noise.mean()
    for shifted in (flat[1:] * flat[:-1], flat[:, 1:] * flat[:, :-1]):
        assert abs(shifted.mean().item()) < 5 * 1.645 / math.sqrt(shifted.numel())


def test_argmax_of_noise_is_a_fair_draw():
    draws = gumbel_noise(torch.arange(6000), torch.zeros(6000, dtype=torch.int64), 6).argmax(-1)
    assert stats.chisquare(torch.bincount(draws, minlength=6).numpy()).pvalue > 1e-3
