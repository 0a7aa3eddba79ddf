"""Storage formats: exact reading, nearest-even writing, and values that survive being stored again bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.checkpoint import formats
from dspark.config import CheckpointError

BLOCKS = [(128, 128), (32, 32), formats.TABLE_BLOCK, (7, 5)]


def bits(values):
    return values.contiguous().view(torch.int32)


def random_fp8(shape, generator):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0  # the two codes that are no number
    return codes.view(formats.FP8_DTYPE)


def random_scale(shape, generator, low=0, high=240):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator).view(formats.SCALE_DTYPE)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(64, 96), (130, 70), (1, 1), (3, 33), (2, 40, 65)])
def test_fp8_values_survive_a_round_trip(block, shape):
    generator = torch.Generator().manual_seed(1)
    weight = random_fp8(shape, generator)
    values = formats.dequantise_fp8(weight, random_scale(formats.scale_shape(shape, block), generator), block)
    again = formats.dequantise_fp8(*formats.quantise_fp8(values, block), block)
    assert torch.equal(bits(values), bits(again))


@pytest.mark.parametrize("shape", [(16, 64), (1, 32), (3, 5, 96)])
def test_fp4_values_survive_a_round_trip(shape):
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=generator).view(
        torch.int8
    )
    values = formats.dequantise_fp4(packed, random_scale((*shape[:-1], shape[-1] // 32), generator))
    assert values.shape == shape
    again = formats.dequantise_fp4(*formats.quantise_fp4(values))
    assert torch.equal(bits(values), bits(again))


def test_fp8_scales_belong_to_their_blocks_also_at_the_edges():
    weight = torch.ones(3, 5).to(formats.FP8_DTYPE)
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8).view(formats.SCALE_DTYPE)
    values = formats.dequantise_fp8(weight, scale, (2, 2))
    assert values.tolist() == [[1, 1, 2, 2, 4], [1, 1, 2, 2, 4], [8, 8, 16, 16, 32]]


def test_the_even_column_lies_in_the_low_nibble():
    packed = torch.tensor([[0x21, -0x79]], dtype=torch.int8)  # bytes 0x21 and 0x87
    assert formats.unpack_fp4(packed).tolist() == [[1, 2, 7, 8]]
    assert torch.equal(formats.pack_fp4(formats.unpack_fp4(packed)), packed)


def test_all_sixteen_codes_have_the_values_of_e2m1():
    values = formats.fp4_values(torch.arange(16, dtype=torch.uint8))
    assert values[:8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert torch.equal(values[8:], -values[:8])
    assert torch.equal(formats.fp4_codes(values), torch.arange(16, dtype=torch.uint8))


def test_fp4_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.fp4_values(formats.fp4_codes(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert formats.fp4_values(formats.fp4_codes(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    above = torch.nextafter(ties, torch.tensor(math.inf))
    assert formats.fp4_values(formats.fp4_codes(above)).tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32))
def test_the_scale_is_the_least_power_of_two_that_reaches_the_largest_value(largest):
    row = torch.zeros(1, 32)
    row[0, 3] = -largest
    for quantise, top in ((lambda x: formats.quantise_fp8(x, (1, 32)), 448.0), (formats.quantise_fp4, 6.0)):
        scale = quantise(row)[1].to(torch.float32).item()
        assert largest <= top * scale
        assert largest > top * scale / 2


def test_a_block_of_zeros_has_scale_one():
    codes, scale = formats.quantise_fp8(torch.zeros(4, 4), (2, 2))
    assert scale.to(torch.float32).unique().tolist() == [1.0]
    assert codes.to(torch.float32).abs().max() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_without_a_code_are_refused(bad):
    values = torch.zeros(2, 32)
    values[1, 4] = bad
    for quantise in (lambda x: formats.quantise_fp8(x, (32, 32)), formats.quantise_fp4):
        with pytest.raises(CheckpointError, match="cannot be stored"):
            quantise(values)


def test_scales_that_do_not_fit_are_refused():
    weight = torch.zeros(4, 64).to(formats.FP8_DTYPE)
    scale = torch.ones(1, 1).to(formats.SCALE_DTYPE)
    with pytest.raises(CheckpointError, match=r"\[4, 64\]"):
        formats.dequantise_fp8(weight, scale, (32, 32))
    with pytest.raises(CheckpointError, match="multiple of 32"):
        formats.quantise_fp4(torch.zeros(2, 40))


def test_rounding_error_is_within_half_a_step():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    stored = formats.dequantise_fp8(*formats.quantise_fp8(values, (32, 32)), (32, 32))
    big = values.abs() > values.abs().max() / 16
    assert ((stored - values).abs() / values.abs())[big].max() <= 2**-4
