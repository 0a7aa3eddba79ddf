"""The sets of op twins that the contract tests hold to the same rules, and where each of them runs."""

import importlib
import importlib.util
from dataclasses import dataclass

import pytest
import torch

from dspark.ops.opset import TORCH_OPS, OpSet
from support.op_case import OpCase, Rows
from support.op_cases import cases_on

TOO_LARGE = ("linear 640x1024 float32", "linear 513x130 float32", "pick_rows of many")
NAMES = [case.name for case in cases_on("cpu")]


@dataclass(frozen=True)
class Backend:
    """A set of twins on a device; `is_slow` where a kernel is interpreted, program by program."""

    name: str
    ops: OpSet
    device: str = "cpu"
    is_slow: bool = False

    def case(self, name: str) -> OpCase:
        """The case of a name, with what it fixes on this device."""
        if self.is_slow and name in TOO_LARGE:
            pytest.skip("too much work for interpreted kernels")
        return next(case for case in cases_on(self.device) if case.name == name)

    def inputs(self, case: OpCase, generator: torch.Generator, num_rows: int) -> Rows:
        """Inputs of a case on this device; the numbers are the same everywhere."""
        return tuple(part.to(self.device) for part in case.make(generator, num_rows))

    def expected(self, case: OpCase, inputs: Rows) -> Rows:
        """What the naive version says, on the host."""
        on_host = next(other for other in cases_on("cpu") if other.name == case.name)
        assert on_host.naive is not None
        return on_host.naive(*(part.cpu() for part in inputs))


def backend(name: str) -> Backend:
    """The twins of a name, or the reason why they cannot run here."""
    if name == "torch":
        return Backend(name, TORCH_OPS)
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if name == "triton interpreted" and torch.cuda.is_available():
        pytest.skip("the kernels run on the accelerator of this machine")
    ops = importlib.import_module("dspark.ops.opset_triton").TRITON_OPS
    on_gpu = name == "triton"
    return Backend(name, ops, "cuda" if on_gpu else "cpu", is_slow=not on_gpu)


BACKENDS = ["torch", "triton interpreted", pytest.param("triton", marks=pytest.mark.gpu)]
