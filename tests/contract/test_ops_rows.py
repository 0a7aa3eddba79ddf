"""The row law, op by op: the bits of a row depend on that row and its context, never on the rows beside it.

Each op runs on each row alone; then on any number of rows, in any order, split anywhere, between rows of garbage, on
one thread and on two. All must give the same bits. The library's own product and sigmoid break this rule on some
machines, which shows that the test can fail.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.op_case import OpCase, Rows
from support.op_sets import BACKENDS, NAMES, Backend, backend

# Garbage rows are not numbers, and the interpreter computes with them in numpy, which remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MOST = 70
COUNTS = (2, 3, 4, 7, 8, 9, 16, 17, 32, 33, 64, MOST)
# Interpreted kernels take milliseconds a program.
MOST_SLOW = 3


def same_bits(left: Rows, right: Rows) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True))


def bits(x: Tensor) -> Tensor:
    kinds = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return x.contiguous().view(kinds[x.dtype]) if x.dtype in kinds else x


def take(rows: Rows, index: Tensor | slice) -> Rows:
    return tuple(part[index] for part in rows)


def join(parts: list[Rows]) -> Rows:
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def garbage_like(rows: Rows) -> Rows:
    """Rows that no one asked for: not a number, infinite or huge where they are real numbers."""
    ugly = torch.tensor([float("nan"), float("inf"), -3e38])
    return tuple(
        ugly[torch.arange(part.numel()) % 3].view(part.shape).to(part) if part.is_floating_point() else part
        for part in rows
    )


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def twins(request):
    return backend(request.param)


@pytest.fixture(params=NAMES)
def case(request, twins):
    return twins.case(request.param)


def rows_alone(case: OpCase, twins: Backend, inputs: Rows) -> Rows:
    """The answer: every row in a call of its own, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = join([case.call(twins.ops, *take(inputs, slice(row, row + 1))) for row in range(inputs[0].shape[0])])
    torch.set_num_threads(before)
    return alone


def test_row_law(case, twins, threads):
    if twins.name != "torch" and torch.get_num_threads() > 1:
        pytest.skip("kernels do not share their work out to threads of the host")
    most, ops = MOST_SLOW if twins.is_slow else MOST, twins.ops
    generator = torch.Generator().manual_seed(5)
    inputs = twins.inputs(case, generator, most)
    alone = rows_alone(case, twins, inputs)
    for count in [count for count in COUNTS if count <= most]:
        for first in {0, 1, most - count} if count < most else {0}:
            part = slice(first, first + count)
            assert same_bits(case.call(ops, *take(inputs, part)), take(alone, part)), f"{count} rows from {first}"
    order = torch.randperm(most, generator=generator).to(twins.device)
    assert same_bits(case.call(ops, *take(inputs, order)), take(alone, order)), "another order"
    for cut in [cut for cut in (1, 5, 8, 31, MOST - 1) if cut < most]:
        split = join([case.call(ops, *take(inputs, part)) for part in (slice(0, cut), slice(cut, most))])
        assert same_bits(split, alone), f"split after {cut}"
    ugly, kept = garbage_like(inputs), min(most, 30)
    for count in [count for count in (1, 4, 11) if count <= most]:
        padded = join([take(ugly, slice(0, count)), take(inputs, slice(0, kept)), take(ugly, slice(0, count))])
        found = take(case.call(ops, *padded), slice(count, count + kept))
        assert same_bits(found, take(alone, slice(0, kept))), "padding"


def test_rows_of_a_wider_tensor(case, twins):
    """A slice of a wider tensor is read with a stride and from an odd address; its values count, not its layout."""
    most, ops = MOST_SLOW if twins.is_slow else MOST, twins.ops
    inputs = twins.inputs(case, torch.Generator().manual_seed(6), most)
    expected = case.call(ops, *inputs)
    strided = []
    for part in inputs:
        wide = torch.zeros(part.shape[0], 3, *part.shape[1:], dtype=part.dtype, device=part.device)
        wide[:, 1] = part
        strided.append(wide[:, 1])
    assert same_bits(case.call(ops, *strided), expected)
    for count in [count for count in (4, 8, 16, 32, 64) if count < most]:
        part = take(tuple(strided), slice(1, 1 + count))
        assert same_bits(case.call(ops, *part), take(expected, slice(1, 1 + count)))


def breaks_row_law(function, inputs: Tensor) -> bool:
    alone = torch.cat([function(inputs[row : row + 1].clone()) for row in range(inputs.shape[0])])
    return any(not torch.equal(function(inputs[:count].clone()), alone[:count]) for count in range(1, inputs.shape[0]))


@pytest.mark.parametrize(
    ("name", "function", "width"),
    [
        ("product", lambda x: F.linear(x, torch.linspace(-1, 1, 640 * 96).view(96, 640)), 640),
        ("sigmoid", torch.sigmoid, 5),
    ],
)
def test_the_librarys_own_op_is_no_twin(name, function, width):
    """Negative control: where this machine's library keeps the law by itself there is nothing to show."""
    inputs = torch.randn(MOST, width, generator=torch.Generator().manual_seed(7)) * 3
    if not breaks_row_law(function, inputs):
        pytest.skip(f"this machine's {name} keeps the row law")


def test_longest_row_that_a_mean_reads_whole(two_threads):
    """Sums over a contiguous last dimension keep their order below 32768 elements, also for a single row."""
    x = torch.randn(3, 32767, generator=torch.Generator().manual_seed(8))
    both = x.square().mean(-1)
    assert torch.equal(torch.cat([row.square().mean(-1, keepdim=True) for row in x]), both)
