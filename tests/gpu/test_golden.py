"""The reference's numbers on an accelerator, with the tolerances of the CPU."""

import importlib

import pytest

from dspark.validate.golden import validate_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["v41_bf16", "v41_quant", "v4_bf16", "v4_quant"])
def test_case_is_reproduced(shared_dir, case, dtype):
    ops = importlib.import_module("dspark.ops.opset_triton").TRITON_OPS
    report = validate_case(shared_dir / "golden" / case, (dtype,), ops, "cuda")
    assert [check for check in report.checks if not check.is_ok] == []
