"""Every op means what its naive double-precision version says; shapes and types are those of the contract."""

import pytest
import torch

from support.op_cases import CASES, OP_SETS


@pytest.mark.parametrize("ops", OP_SETS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("case", [case for case in CASES if case.naive], ids=str)
def test_values(case, ops):
    inputs = case.make(torch.Generator().manual_seed(0), 23)
    outputs, expected = case.call(ops, *inputs), case.naive(*inputs)
    assert len(outputs) == len(expected)
    for found, wanted in zip(outputs, expected, strict=True):
        assert found.shape == wanted.shape
        if not found.is_floating_point():
            assert torch.equal(found, wanted)
            continue
        error = ((found.double() - wanted).abs() / (1 + wanted.abs())).max().item()
        assert error <= case.tolerance, f"error {error}"


@pytest.mark.parametrize("ops", OP_SETS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rows_give_no_rows(case, ops):
    """A pass may complete no group and touch no expert; an op then returns empty outputs of the right kind."""
    generator = torch.Generator().manual_seed(0)
    some = case.call(ops, *case.make(generator, 3))
    if case.name.startswith("routed_experts"):
        pytest.skip("a pass has at least one row, and each row has experts")
    none = case.call(ops, *case.make(generator, 0))
    for filled, empty in zip(some, none, strict=True):
        assert empty.shape == (0, *filled.shape[1:])
        assert empty.dtype == filled.dtype


@pytest.mark.parametrize("ops", OP_SETS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("field", ["quantise_fp8", "quantise_fp4", "quantise_fp4_e4m3"])
def test_quantising_twice_changes_nothing(ops, field):
    """Cached rows lie on their grid, so reading and writing them again is exact."""
    quantise = getattr(ops, field)
    once = quantise(torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * 5, 16)
    if field == "quantise_fp4_e4m3":
        pytest.skip("its scale is not a power of two: amax / 6 need not come back to the same e4m3 number")
    assert torch.equal(quantise(once, 16), once)


@pytest.mark.parametrize("ops", OP_SETS, ids=lambda ops: ops.name)
def test_index_scores_of_several_requests(ops):
    """Each request's rows meet its own keys; beyond them the scores are zero."""
    generator = torch.Generator().manual_seed(2)
    q, weights = torch.randn(9, 3, 32, generator=generator), torch.randn(9, 3, generator=generator)
    keys = [torch.randn(count, 32, generator=generator) for count in (64, 192, 128)]
    spans = [slice(0, 2), slice(2, 3), slice(3, 9)]
    scores = ops.index_scores(q, weights, list(zip(spans, keys, strict=True)))
    assert scores.shape == (9, 192)
    for span, own in zip(spans, keys, strict=True):
        alone = ops.index_scores(q[span], weights[span], [(slice(0, span.stop - span.start), own)])
        assert torch.equal(scores[span, : own.shape[0]], alone)
        assert not scores[span, own.shape[0] :].any()
