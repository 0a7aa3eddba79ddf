"""Words written into other ranks' memory: sums have the bits of the torch twin, and a side is used anew in every call.

Ranks of this test share a process, so each call is launched in two halves: all send, then all receive.
"""

import importlib
import importlib.util

import pytest
import torch
from torch import Tensor

from dspark.ops.parts import sum_parts

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
ranks = importlib.import_module("dspark.ops.triton.ranks")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if ON_GPU else []
CAPACITY = 4096


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Interpreted programs take milliseconds each."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(ranks, "PROGRAMS", 3)


class Ranks:
    """Several ranks in one process."""

    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size, ranks.SIDES * size * CAPACITY, dtype=torch.int64, device=DEVICE)
        addresses = [inbox.data_ptr() for inbox in self.memory]
        self.inboxes = [ranks.Inboxes(addresses, rank, CAPACITY, DEVICE) for rank in range(size)]

    def run(self, call: str, parts: list[Tensor]) -> list[Tensor]:
        for inbox, part in zip(self.inboxes, parts, strict=True):
            getattr(inbox, call)(part, receives=False)
        return [getattr(inbox, call)(part, sends=False) for inbox, part in zip(self.inboxes, parts, strict=True)]


def parts_of(size: int, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, *shape, generator=generator) * torch.exp(
        3 * torch.randn(size, *shape, generator=generator)
    )
    return list(values.to(dtype).to(DEVICE))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_exchanges(size):
    group = Ranks(size)
    for seed, (dtype, shape) in enumerate(
        [
            (torch.bfloat16, (3, 64)),
            (torch.float32, (2, 33)),
            (torch.float32, (4, 1000)),
            (torch.bfloat16, (1, 2)),
            (torch.bfloat16, (3, 64)),
        ]
    ):
        parts = parts_of(size, dtype, shape, seed)
        wanted = sum_parts(torch.stack(parts))
        assert all(torch.equal(found, wanted) for found in group.run("sum", parts)), (dtype, shape)
        wide = torch.cat(parts, dim=1)
        assert all(torch.equal(found, wide) for found in group.run("gather_columns", parts)), (dtype, shape)


def test_whole_words_of_a_limited_number_travel():
    inbox = Ranks(2).inboxes[0]
    assert inbox.takes(torch.empty(CAPACITY, device=DEVICE)) and not inbox.takes(torch.empty(CAPACITY + 1))
    assert not inbox.takes(torch.empty(3, dtype=torch.bool)) and not inbox.takes(torch.empty(0))
    assert inbox.takes(torch.empty(4, dtype=torch.float16)) and not inbox.takes_sum(torch.empty(4, dtype=torch.float16))
