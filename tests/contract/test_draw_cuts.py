"""Where filters cut: the kernels keep, token for token, what the twin keeps that sorts its rows.

Searched are ties at every cut, rows whose tokens all tie, masked tokens, limits beyond the row, and shares so close to
1 that float64 rounds them.
"""

import importlib
import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config.sampling import SamplingParams
from dspark.ops.draw import DrawParams, filtered

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 7.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 60, 90, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 1.0 - 2.0**-53, 0.999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 1e-5, 0.3, 1.0]),
)


@pytest.fixture(scope="module")
def kernels():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return importlib.import_module("dspark.ops.triton.filters"), importlib.import_module("dspark.ops.triton.draw")


@settings(max_examples=25 if not torch.cuda.is_available() else 300, deadline=None)
@given(
    params=st.lists(params_strategy, min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 6.0]),
    grid=st.sampled_from([None, 2.0, 64.0]),
    masked=st.booleans(),
    width=st.sampled_from([1, 61, 1500] if torch.cuda.is_available() else [1, 61]),
)
def test_kernels_keep_what_the_twin_keeps(kernels, params, seed, scale, grid, masked, width):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), width, generator=generator) * scale
    logits = logits if grid is None else logits.mul(grid).round() / grid
    if masked:
        logits[:, 1:] = logits[:, 1:].masked_fill(
            torch.rand(len(params), width - 1, generator=generator) < 0.5, -torch.inf
        )
    packed = DrawParams.pack(params)
    wanted = filtered(logits, packed) > -torch.inf
    logits, words = logits.to(device), packed.words.to(device)
    owners = torch.arange(len(params), device=device)
    cuts = kernels[0].find_cuts(logits, logits.amax(1, keepdim=True), owners, words).cuts.cpu()
    divisor = torch.where(packed.temperature > 0, packed.temperature, 1.0)[:, None]
    scaled = (logits.cpu() - logits.cpu().amax(1, keepdim=True)) / divisor
    distance = scaled.view(torch.int32) & (2**31 - 1)
    tie = (distance == cuts[:, :1]) & (torch.arange(width) <= cuts[:, 1:])
    kept = ((distance < cuts[:, :1]) | tie) & (scaled >= packed.log_min_p[:, None])
    is_warm = packed.temperature > 0
    assert torch.equal(kept[is_warm] & (scaled[is_warm] > -torch.inf), wanted[is_warm])
    assert kept[torch.arange(len(params)), logits.cpu().argmax(1)].all()
