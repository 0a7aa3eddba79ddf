"""Every op means what its naive double-precision version says; shapes and types are those of the contract."""

from types import SimpleNamespace

import pytest
import torch

from dspark.ops import quantise as quantise_ops
from dspark.ops.index import IndexKeys
from dspark.ops.kept_rows import RowForm
from dspark.ops.places import PlaceJob, PlaceJobs, RingRows, RowPlaces, group_places, visible_places, window_places
from dspark.ops.rope import TurnTable, rope_frequencies
from support.op_sets import BACKENDS, NAMES, backend


@pytest.fixture(params=BACKENDS)
def twins(request):
    return backend(request.param)


@pytest.fixture(params=NAMES)
def case(request, twins):
    return twins.case(request.param)


def test_values(case, twins):
    if case.naive is None:
        pytest.skip("a test of its own says more")
    inputs = twins.inputs(case, torch.Generator().manual_seed(0), 7 if twins.is_slow else 23)
    outputs, expected = case.call(twins.ops, *inputs), twins.expected(case, inputs)
    assert len(outputs) == len(expected)
    for found, wanted in zip([part.cpu() for part in outputs], expected, strict=True):
        assert found.shape == wanted.shape
        if not found.is_floating_point():
            assert torch.equal(found, wanted)
            continue
        error = ((found.double() - wanted).abs() / (1 + wanted.abs())).max().item()
        assert error <= case.tolerance, f"error {error}"


def test_no_rows_give_no_rows(case, twins):
    """A pass may complete no group and touch no expert; an op then returns empty outputs of the right kind."""
    generator = torch.Generator().manual_seed(0)
    some = case.call(twins.ops, *twins.inputs(case, generator, 3))
    if case.name.startswith("mixture"):
        pytest.skip("a pass has at least one row, and each row has experts")
    none = case.call(twins.ops, *twins.inputs(case, generator, 0))
    for filled, empty in zip(some, none, strict=True):
        assert empty.shape == (0, *filled.shape[1:])
        assert empty.dtype == filled.dtype


def quantised(twins, rows, kind):
    """Rows in the form of a quantiser, not turned."""
    still = torch.ones(len(rows), 16, device=twins.device), torch.zeros(len(rows), 16, device=twins.device)
    return twins.ops.form_rows(rows, still, RowForm(kind, 16))


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantising_twice_changes_nothing(twins, kind):
    """Cached rows lie on their grid, so reading and writing them again is exact.

    An e4m3 scale is no power of two: there, amax / 6 need not come back to the same number.
    """
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * 5
    once = quantised(twins, rows.to(twins.device), kind)
    assert torch.equal(quantised(twins, once, kind), once)


@pytest.mark.parametrize("kind", ["fp8", "fp4", "fp4_e4m3"])
def test_forms_are_quantised_as_by_the_op(twins, kind):
    """Without rotation a form is the quantiser; what it skips passes through, and the transform is its own inverse."""
    rows = (torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(4)) * 5).to(twins.device).bfloat16()
    still = torch.ones(3, 16, device=twins.device), torch.zeros(3, 16, device=twins.device)
    quantise = getattr(quantise_ops, f"quantise_{kind}")
    assert torch.equal(quantised(twins, rows, kind), quantise(rows, 16))
    head, tail = quantise(rows[..., :48], 16), rows[..., 48:]
    assert torch.equal(twins.ops.form_rows(rows, still, RowForm(kind, 16, skip=16)), torch.cat((head, tail), dim=-1))
    turned = twins.ops.form_rows(rows.float(), still, RowForm("none", 0, hadamard=True))
    assert torch.equal(quantised(twins, turned, kind), quantise(turned, 16))
    again = twins.ops.form_rows(turned, still, RowForm("none", 0, hadamard=True))
    assert torch.allclose(again, rows.float(), atol=1e-5)
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]) / 8
    assert torch.allclose(turned.cpu(), rows.float().cpu() @ signs, atol=1e-5)


def attention_inputs(num_rows, picks, heads, device):
    """Queries, positions and keys of two stores; later rows see fewer keys, the last of several sees none."""
    generator = torch.Generator().manual_seed(num_rows)
    q, near, far = (torch.randn(*shape, generator=generator) for shape in ((num_rows, heads, 32), (50, 32), (400, 32)))
    window = torch.randint(0, 50, (num_rows, 40), generator=generator)
    chosen = torch.randint(0, 400, (num_rows, picks), generator=generator)
    number = torch.arange(num_rows).unsqueeze(1)
    chosen.masked_fill_(torch.arange(picks) >= picks - 45 * number, -1)
    if num_rows > 1:
        window[-1], chosen[-1] = -1, -1
    turn = torch.ones(num_rows, 8), torch.zeros(num_rows, 8)
    return [part.to(device) for part in (q, *turn, near, window, far, chosen, torch.randn(heads, generator=generator))]


def test_rows_of_attention_that_see_less_than_others(twins):
    """In calls of any size a row finds what it finds alone, also where others have segments of keys and it has none."""
    heads = 20
    for num_rows, picks in ((4, 200), (2, 33), (3, 0), (5, 90)):
        q, cos, sin, near, window, far, chosen, sink = attention_inputs(num_rows, picks, heads, twins.device)
        found = twins.ops.attend(q, (cos, sin), [(near, window), (far, chosen)], sink, 0.2)
        for row in range(num_rows):
            own = slice(row, row + 1)
            parts = [(near, window[own]), (far, chosen[own])]
            assert torch.equal(found[own], twins.ops.attend(q[own], (cos[own], sin[own]), parts, sink, 0.2))
        assert not found[-1].any()


def test_places_of_a_pass(twins):
    """Kernels and twins address the same rows: windows, visible rows, groups with members of the pass and before it."""
    positions = torch.tensor([10, 11, 12, 7, 8, 0, 127, 0])
    slots = torch.tensor([3, 3, 3, 0, 0, 1, 5, -1])
    owners = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    pages = torch.randperm(60, generator=torch.Generator().manual_seed(5)).view(4, 15)
    rows = RowPlaces(*(part.to(twins.device) for part in (positions, slots, owners, pages)))
    wanted = RowPlaces(positions, slots, owners, pages)
    assert torch.equal(twins.ops.visible_places(rows, 4, 3, 32).cpu(), visible_places(wanted, 4, 3, 32))
    groups = [PlaceJob(ratio, reach, 13, 78, 16 // ratio) for ratio, reach in ((1, 1), (4, 8), (4, 4), (8, 8))]
    jobs = PlaceJobs([PlaceJob(0, 8, 13), *groups, PlaceJob(0, 5, 9), groups[0]], twins.device)
    assert len(jobs.jobs) == 6
    for job, found in zip(jobs.jobs, twins.ops.pass_places(rows, jobs), strict=True):
        if job.ratio:
            for left, right in zip(found, group_places(wanted, *job), strict=True):
                assert torch.equal(left.cpu(), right)
        else:
            assert torch.equal(found.members.cpu(), window_places(slots, positions, job.reach, job.ring_rows))
    keys = twins.ops.request_places(rows.pages, 4, 50, 128).cpu()
    assert torch.equal(keys[:, :50], pages[:, :13].repeat_interleave(4, 1)[:, :50] * 4 + torch.arange(50) % 4)
    assert (keys[:, 50:] == -1).all()
    members = group_places(wanted, 4, 4, 13, 78, 4).members
    assert members[1].tolist() == [39 + 8, 39 + 9, 78 + 0, 78 + 1]
    assert (members[0] == -1).all() and (members[7] == -1).all()


def test_index_scores_of_several_requests(twins):
    """Each request's rows meet its own keys, wherever in the store they lie; beyond them the scores are zero."""
    generator = torch.Generator().manual_seed(2)
    q, weights = torch.randn(9, 3, 32, generator=generator), torch.randn(1, 9, 3, generator=generator)
    store, order = torch.randn(400, 32, generator=generator), torch.randperm(400, generator=generator)
    counts, owners = (64, 192, 97), torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 2])
    places = torch.full((3, 192), -1)
    for request, count in enumerate(counts):
        places[request, :count] = order[:count].roll(request)
    q, weights, store, places, owners = (part.to(twins.device) for part in (q, weights, store, places, owners))
    scores = twins.ops.index_scores(q, weights, 0, IndexKeys(store, places, owners))
    assert scores.shape == (9, 192)
    for row, request in enumerate(owners.tolist()):
        own = IndexKeys(
            store[places[request, : counts[request]]], torch.arange(192, device=twins.device)[None], owners[:1]
        )
        own.places[0, counts[request] :] = -1
        alone = twins.ops.index_scores(q[row : row + 1], weights[:, row : row + 1], 0, own)
        assert torch.equal(scores[row, : counts[request]], alone[0, : counts[request]])
        assert not scores[row, counts[request] :].any()


def test_rotations_of_a_pass(twins):
    """All of a table at once have the bits of each alone, at the first positions of the rows' groups."""
    positions = torch.tensor([0, 3, 4, 127, 4999], device=twins.device)
    freqs = torch.stack([rope_frequencies(16, base, None) for base in (10000.0, 4e4, 10000.0)]).to(twins.device)
    ratios = [1, 4, 128]
    found = twins.ops.row_rotations(positions, TurnTable(freqs, torch.tensor(ratios, device=twins.device)))
    for turn, own, ratio in zip(found, freqs, ratios, strict=True):
        for left, right in zip(turn, twins.ops.rotations(positions - positions % ratio, own), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("kind", ["none", "fp8"])
def test_keys_go_to_their_ring(twins, dtype, stored, kind):
    """The ring has the bits that the rows have alone; a slot of -1 is nowhere, and other rows stay as they are."""
    generator = torch.Generator().manual_seed(3)
    sums = torch.randn(2, 5, 40, generator=generator).to(twins.device)
    slots, positions = (torch.tensor(part, device=twins.device) for part in ([2, -1, 0, 0, -1], [9, 1, 3, 4, 0]))
    dtype = getattr(torch, dtype)
    norms = [SimpleNamespace(weight=torch.rand(n, generator=generator).to(twins.device), eps=1e-6) for n in (24, 16)]
    form, turn = RowForm(kind, 8), twins.ops.rotations(positions, rope_frequencies(8, 1e4, None).to(twins.device))
    query, key = (norms[0], form), (norms[1], form)
    latent, rows = twins.ops.latents(sums, dtype, query, key, turn, None)
    expected = torch.full((3, 7, 16), 7.0, dtype=getattr(torch, stored), device=twins.device)
    homes = [RingRows(expected.clone(), slots, positions) for _ in range(2)]
    for row, (slot, place) in {0: (2, 2), 2: (0, 3), 3: (0, 4)}.items():
        expected[slot, place] = rows[row].to(expected.dtype)
    found, ring = twins.ops.latents(sums, dtype, query, key, turn, homes[0])
    assert torch.equal(found, latent)
    assert ring is homes[0].ring
    assert torch.equal(ring, expected)
    assert torch.equal(twins.ops.key_rows(sums, 24, dtype, norms[1], turn, form, homes[1]), expected)
