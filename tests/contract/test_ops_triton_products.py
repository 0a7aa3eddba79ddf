"""Products with coded weights: the kernels mean what the torch twin means, and a row's bits are its own.

Property: linear maps and routed experts of packed fp4, packed fp8 and bf16 weights agree with the twin on the stored
values; and rows alone, in any number, order and split, between rows of garbage, give the same bits.
Story: block sizes, row blocks and sections side by side change with the number of rows; none may show in the result.
Not tested here: speed. The same body runs on an accelerator, with more rows and wider weights, and interpreted.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dspark.checkpoint.formats import dequantise_fp4, dequantise_fp8, quantise_fp4, quantise_fp8
from dspark.config.errors import DSparkError
from dspark.ops import experts as torch_experts
from dspark.ops.linear import linear as torch_linear
from dspark.ops.packing import PackedWeight, join_rows, pack_fp4, pack_fp8, stack_experts, unpack
from dspark.ops.quantise import quantise_fp8 as fake_quantise
from dspark.ops.route import Route

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
WIDE = 8 if ON_GPU else 1  # weights of an accelerator's size there; a kernel is interpreted program by program here
COUNTS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 300, 900) if ON_GPU else (2, 17)
EXPERT_ROWS = max(COUNTS) + 1 if ON_GPU else 5
LIMIT = 2.0


@pytest.fixture(scope="module")
def kernels():
    """The modules of the kernels, or the reason why they cannot run here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    names = ("linear", "experts")
    linear, experts = (importlib.import_module(f"dspark.ops.triton.{name}") for name in names)
    if not ON_GPU and not importlib.import_module("dspark.ops.triton.launch").INTERPRETED:
        pytest.skip("there is no accelerator, and triton was imported before the interpreter was asked for")
    return linear, experts


@dataclass(frozen=True)
class Coded:
    """A weight as the kernels take it, and its values [E, N, K] float32 for the twin."""

    weight: Tensor | PackedWeight
    values: Tensor


def coded(kind: str, *shape: int, seed: int = 0) -> Coded:
    """A random weight [.., N, K] in a storage form: bf16, fp4, or fp8 with the side of its blocks."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5
    if kind == "bf16":
        return Coded(values.bfloat16().to(DEVICE), values.bfloat16().float().to(DEVICE))
    if kind == "fp4":
        codes, scale = quantise_fp4(values)
        return Coded(pack_fp4(codes, scale).to(DEVICE), dequantise_fp4(codes, scale).to(DEVICE))
    block = (int(kind[4:]), int(kind[4:]))
    codes, scale = quantise_fp8(values, block)
    return Coded(pack_fp8(codes, scale, block).to(DEVICE), dequantise_fp8(codes, scale, block).to(DEVICE))


def rows_of(count: int, width: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).abs() / (1 + wanted.double().abs())).max().item()


def check_row_law(call, inputs: tuple[Tensor, ...]) -> None:
    """`call` on rows alone, counted, reordered, split and padded with garbage: the same bits for the same row."""
    most = inputs[0].shape[0]
    whole = call(*inputs)
    for row in (0, most - 1):
        assert torch.equal(call(*(part[row : row + 1] for part in inputs)), whole[row : row + 1]), f"row {row} alone"
    for count in COUNTS:
        if count < most:
            assert torch.equal(call(*(part[:count] for part in inputs)), whole[:count]), f"{count} rows"
    order = torch.randperm(most, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(call(*(part[order] for part in inputs)), whole[order]), "another order"
    cut = most // 3
    split = torch.cat([call(*(part[piece] for part in inputs)) for piece in (slice(0, cut), slice(cut, most))])
    assert torch.equal(split, whole), f"split after {cut}"
    padded = call(*(torch.cat((garbage(part[:5]), part)) for part in inputs))
    assert torch.equal(padded[5:], whole), "behind rows of garbage"


def garbage(part: Tensor) -> Tensor:
    return torch.full_like(part, float("nan")) if part.is_floating_point() else part


LINEAR_KINDS = ("bf16", "fp4", "fp8 32", "fp8 128")
# On an accelerator the first is summed in sections; N and K need not be whole blocks.
LINEAR_SHAPES = ((64 * WIDE, 8192 if ON_GPU else 256), (130, 160), (24, 32))


@pytest.mark.parametrize("kind", LINEAR_KINDS)
@pytest.mark.parametrize(("width", "depth"), LINEAR_SHAPES, ids=str)
def test_linear_values(kernels, kind, width, depth):
    weight = coded(kind, width, depth)
    x = rows_of(5, depth)
    exact = x.double() @ weight.values.reshape(width, depth).double().t()
    assert error(kernels[0].linear(x, weight.weight, torch.float32), exact) < 1e-5
    twin = torch_linear(x.cpu(), weight.values.reshape(width, depth).cpu()).to(DEVICE)
    assert error(kernels[0].linear(x, weight.weight), twin) < 8e-3
    wide = rows_of(3, depth, dtype=torch.float32)
    exact = wide.double() @ weight.values.reshape(width, depth).double().t()
    assert error(kernels[0].linear(wide, weight.weight), exact) < 1e-5


@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_linear_rows(kernels, kind):
    width, depth = LINEAR_SHAPES[0]
    weight = coded(kind, width, depth)
    check_row_law(lambda x: kernels[0].linear(x, weight.weight), (rows_of(max(COUNTS) + 1, depth),))


def test_linear_rows_of_float32(kernels):
    weight = coded("fp8 32", 64, 256)
    check_row_law(lambda x: kernels[0].linear(x, weight.weight), (rows_of(20, 256, dtype=torch.float32),))


def test_sections_one_after_the_other_or_side_by_side(kernels, monkeypatch):
    """Where the sums of sections would take too much memory, a program adds them itself: the same bits."""
    weight, x = coded("fp8 32", 24, 2048), rows_of(3, 2048)
    assert kernels[0].sections_of(weight.weight) > 1
    beside = kernels[0].linear(x, weight.weight)
    monkeypatch.setattr(kernels[0], "_MOST_BYTES_SIDE_BY_SIDE", 0)
    assert torch.equal(kernels[0].linear(x, weight.weight), beside)


def test_sums_that_a_reader_adds_have_one_type(kernels, monkeypatch):
    """Added already or not, they are float32: a reader's reductions are laid out by the type, and rows by the call."""
    weight, x = coded("fp8 32", 24, 2048), rows_of(3, 2048)
    beside = kernels[0].product_parts(x, weight.weight)
    monkeypatch.setattr(kernels[0], "_MOST_BYTES_SIDE_BY_SIDE", 0)
    monkeypatch.setattr(kernels[0], "INTERPRETED", False)  # whose results are float32 anyway
    added = kernels[0].product_parts(x, weight.weight)
    assert beside.shape[0] > 1 == added.shape[0] and beside.dtype == added.dtype == torch.float32
    total = beside[0]
    for part in beside[1:]:
        total = total + part
    assert torch.equal(added[0], total)


@pytest.mark.parametrize("kind", ["fp8 32", "bf16"])
def test_groups_of_rows_read_their_own_columns(kernels, kind):
    groups, width, depth = 2, 128, 128
    weight = coded(kind, groups * width, depth)
    x = rows_of(5, groups * depth)
    values = weight.values.reshape(groups, width, depth)
    parts = [x[:, g * depth : (g + 1) * depth].double() @ values[g].double().t() for g in range(groups)]
    found = kernels[0].linear(x, weight.weight, torch.float32, groups=groups)
    assert error(found, torch.cat(parts, dim=1)) < 1e-5


@pytest.mark.parametrize(("width", "depth", "group"), [(128, 128, 32), (128, 128, 128), (32, 1024, 16)], ids=str)
def test_a_result_is_quantised_as_by_the_op(kernels, monkeypatch, width, depth, group):
    """By the product whose programs hold whole groups of columns, by the launch that adds sections, by a launch."""
    weight = coded("fp8 32", 2 * width, depth)
    x = rows_of(max(COUNTS) + 1, 2 * depth)
    for count in (0, 1, *COUNTS):
        found = kernels[0].quantised_linear(x[:count], weight.weight, 2, group)
        plain = kernels[0].linear(x[:count], weight.weight, groups=2)
        assert found.dtype == plain.dtype and torch.equal(found, fake_quantise(plain, group)), f"{count} rows"
    monkeypatch.setattr(kernels[0], "_MOST_BYTES_SIDE_BY_SIDE", 0)
    wanted = fake_quantise(kernels[0].linear(x, weight.weight, groups=2), group)
    assert torch.equal(kernels[0].quantised_linear(x, weight.weight, 2, group), wanted)


def test_no_rows_give_no_rows(kernels):
    weight = coded("fp8 32", 64, 256)
    assert kernels[0].linear(rows_of(0, 256), weight.weight).shape == (0, 64)


EXPERT_KINDS = ("bf16", "fp4", "fp8 32")
HIDDEN, INNER, EXPERTS = 128 * WIDE, 64 * WIDE, 4


def expert_inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, expert ids and weights; the last expert is never chosen."""
    generator = torch.Generator().manual_seed(3)
    x = fake_quantise(torch.randn(count, HIDDEN, generator=generator).bfloat16(), 32).to(DEVICE)
    ids = torch.rand(count, EXPERTS - 1, generator=generator).argsort(-1)[:, :2].to(DEVICE)
    return x, ids, torch.rand(count, 2, generator=generator).to(DEVICE)


def expert_weights(kind: str) -> tuple[Coded, Coded]:
    return coded(kind, EXPERTS, 2 * INNER, HIDDEN, seed=4), coded(kind, EXPERTS, HIDDEN, INNER, seed=5)


def routed_sum(kernels, x: Tensor, route: Route, experts: Sequence[Tensor | PackedWeight]) -> Tensor:
    """Sum over a row's experts, quantised in front of the second product in its own launch."""
    return kernels[1].combine(kernels[1].pair_outputs(x, route, experts, LIMIT, 32), route)


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_routed_experts_values(kernels, kind):
    w13, w2 = expert_weights(kind)
    x, ids, weights = expert_inputs(7)
    twin = torch_experts.routed_experts(
        x.cpu(),
        Route(ids.cpu(), weights.cpu()),
        w13.values.cpu(),
        w2.values.cpu(),
        LIMIT,
        lambda y: fake_quantise(y, 32),
    ).to(DEVICE)
    route = Route(ids, weights)
    assert error(routed_sum(kernels, x, route, (w13.weight, w2.weight)), twin) < 2e-2
    found = kernels[1].routed_experts(x, route, w13.weight, w2.weight, LIMIT, lambda y: fake_quantise(y, 32))
    assert error(found, twin) < 2e-2


@pytest.mark.parametrize("kind", EXPERT_KINDS if ON_GPU else ["fp4"])
def test_routed_experts_rows(kernels, kind):
    w13, w2 = expert_weights(kind)

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return routed_sum(kernels, x, Route(ids, weights), (w13.weight, w2.weight))

    check_row_law(call, expert_inputs(EXPERT_ROWS))


@pytest.mark.parametrize("kind", ["fp4", "bf16"])
def test_experts_that_ranks_hold_add_up_to_all(kernels, kind):
    """Of two slots each rank adds its own to zero, so the sum over ranks is the whole sum to the bit."""
    stacks = [weight.weight for weight in expert_weights(kind)]
    x, ids, weights = expert_inputs(EXPERT_ROWS)
    whole = routed_sum(kernels, x, Route(ids, weights), stacks)
    total = torch.zeros_like(whole)
    for held in (range(2), range(2, EXPERTS - 1), range(EXPERTS - 1, EXPERTS)):
        own = [members(stack, held) for stack in stacks]

        def call(x: Tensor, ids: Tensor, weights: Tensor, own: list = own, held: range = held) -> Tensor:
            return routed_sum(kernels, x, Route(ids, weights, held), own)

        check_row_law(call, (x, ids, weights))
        total += call(x, ids, weights)
    assert torch.equal(total, whole)
    assert not torch.equal(whole, torch.zeros_like(whole))


def members(stack: Tensor | PackedWeight, held: range) -> Tensor | PackedWeight:
    """Some weights of a stack."""
    if isinstance(stack, Tensor):
        return stack[held.start : held.stop]
    codes, scales = stack.codes[held.start : held.stop], stack.scales[held.start : held.stop]
    return replace(stack, codes=codes, scales=scales)


@pytest.mark.parametrize("beside", [INNER, 2 * INNER, INNER // 2])
def test_mixture_is_routed_and_shared_together(kernels, beside):
    """The shared expert's width need not be that of the others: ranks may divide the one and not the others."""
    experts, shared = expert_weights("fp4"), (coded("fp8 32", 2 * beside, HIDDEN), coded("fp8 32", HIDDEN, beside))

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        beside = kernels[1].shared_expert(x, (shared[0].weight, shared[1].weight), LIMIT, 32)
        pair = experts[0].weight, experts[1].weight
        return kernels[1].sum_terms(kernels[1].mixture(x, Route(ids, weights), pair, beside, LIMIT, 32))

    x, ids, weights = expert_inputs(EXPERT_ROWS)
    check_row_law(call, (x, ids, weights))
    routed = routed_sum(kernels, x, Route(ids, weights), (experts[0].weight, experts[1].weight))
    projected = kernels[0].linear(x, shared[0].weight)
    inner = fake_quantise(torch_experts.gate_and_up(projected, LIMIT).bfloat16(), 32)
    wanted = (routed + kernels[0].linear(inner, shared[1].weight)).bfloat16()
    assert error(call(x, ids, weights), wanted) < 2e-2


@pytest.mark.parametrize("kind", ["fp4", "fp8 32", "fp8 128"])
@pytest.mark.parametrize("shape", [(1, 64, 128), (2, 130, 288), (3, 24, 32)], ids=str)
def test_packing_keeps_every_value(kind, shape):
    weight = coded(kind, *shape)
    assert isinstance(weight.weight, PackedWeight)
    assert torch.equal(unpack(weight.weight), weight.values)


def test_weights_of_one_input_are_joined():
    """Maps that read the same rows become one product; each keeps its own values."""
    first, second = coded("fp8 128", 256, 256), coded("fp8 128", 128, 256, seed=7)
    joined = join_rows([pack_of(first), pack_of(second)])
    assert torch.equal(unpack(joined), torch.cat((first.values, second.values)).unsqueeze(0))


def test_experts_are_stacked_as_they_are_read():
    """Gate and up of an expert are joined, then the experts stacked, so that they can be packed one by one."""
    experts = [(coded("fp4", 128, 64, seed=place), coded("fp4", 128, 64, seed=9 + place)) for place in range(3)]
    packs = [join_rows([pack_of(gate), pack_of(up)]) for gate, up in experts]
    wanted = torch.stack([torch.cat((gate.values, up.values)) for gate, up in experts])
    assert torch.equal(unpack(stack_experts(packs)), wanted)


def pack_of(weight: Coded) -> PackedWeight:
    assert isinstance(weight.weight, PackedWeight)
    return weight.weight


def test_scales_beyond_the_kernels_are_refused():
    codes, scale = quantise_fp4(torch.ones(64, 32))
    huge = torch.full_like(scale.view(torch.uint8), 140).view(scale.dtype)
    with pytest.raises(DSparkError, match=r"2\^13"):
        pack_fp4(codes, huge)
    with pytest.raises(DSparkError, match="16x16"):
        pack_fp8(*quantise_fp8(torch.ones(64, 64), (16, 16)), (16, 16))


@pytest.mark.parametrize("kind", ["bf16", "fp8 128", "float32"])
def test_wide_results(kernels, kind):
    """A map asked for float32 gives its sums as they are, whatever holds the weight: logits must not be made ties."""
    linear, _ = kernels
    weight = coded("bf16" if kind == "float32" else kind, 160, 128)
    held = weight.values if kind == "float32" else weight.weight
    x = rows_of(3, 128)
    found = linear.linear(x, held, torch.float32)
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
    assert error(found, torch_linear(x.float(), weight.values)) < 1e-5
