"""Library products under `exactness="fast"`: the same values, used only where the library reads a weight as it is."""

from dataclasses import replace

import pytest
import torch

from dspark.config import Config, ConfigError
from dspark.engine.device import place
from dspark.ops.library import with_library_products
from dspark.ops.opset import TORCH_OPS

FAST = with_library_products(TORCH_OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_values_are_those_of_the_exact_products(num_rows, dtype):
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(n, 64, generator=generator).to(dtype) for n in (num_rows, 48))
    exact = TORCH_OPS.linear(x, weight.float())
    tolerance = {"rtol": 2e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(FAST.linear(x, weight), exact, **tolerance)
    wide = FAST.linear_wide(x, weight)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, TORCH_OPS.linear_wide(x, weight.float()), rtol=1e-4, atol=1e-4)
    grouped = torch.cat([x, x.flip(1)], dim=1)
    wanted = TORCH_OPS.grouped_linear(grouped, weight.float(), 2, 0)
    torch.testing.assert_close(FAST.grouped_linear(grouped, weight, 2, 0), wanted, **tolerance)
    quantised = FAST.grouped_linear(grouped, weight, 2, 24)
    assert torch.equal(quantised, TORCH_OPS.quantise_fp8(FAST.grouped_linear(grouped, weight, 2, 0), 24))


def test_rows_that_would_lose_bits_stay_with_the_exact_product():
    """float32 rows on a bf16 weight: the library would round the rows."""
    seen = []
    ops = with_library_products(replace(TORCH_OPS, linear=lambda *pair: seen.append(pair)))
    ops.linear(torch.ones(1, 4), torch.ones(2, 4, dtype=torch.bfloat16))
    assert len(seen) == 1


def test_a_configuration_chooses_them():
    assert place(Config(device="cpu")).ops is TORCH_OPS
    assert place(Config(device="cpu", exactness="fast")).ops.name == "torch with library products"
    with pytest.raises(ConfigError, match="exactness must be one of exact, fast"):
        Config(exactness="quick")
