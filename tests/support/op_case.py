"""An op as rows in, rows out, and how its inputs are drawn."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]


@dataclass(frozen=True)
class OpCase:
    """One op on rows.

    Attributes:
        make: generator, T -> inputs, each with T rows.
        call: twins, inputs -> outputs, each with T rows.
        naive: inputs -> what the outputs should be, in double precision; None where a test of its own says more.
        tolerance: largest error relative to 1 + |value|.
    """

    name: str
    make: Callable[[torch.Generator, int], Rows]
    call: Callable[..., Rows]
    naive: Callable[..., Rows] | None = None
    tolerance: float = 2e-5

    def __str__(self) -> str:
        return self.name


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu")


def fixed(seed: int, *shape: int) -> Tensor:
    """What all rows share: the same numbers in every call, on the device for which the cases are made."""
    return normal(torch.Generator().manual_seed(seed), *shape).to(torch.get_default_device())
