"""Checks of passes: the same rows, bit for bit, wherever a request lies and whatever lies beside it.

Graphs are captured in the first arrangement and only launched in those that follow: one shape serves them all, so a
graph that had bound a request, a slot, a page or memory of its own capture would show it.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dspark.engine.graphs import GraphPlan
from dspark.engine.runner import SpanTokens
from dspark.models.build import Model
from dspark.state.model_state import ModelState, RequestState, tail_key
from dspark.validate.lifecycle.probe import ProbeResult
from dspark.validate.poison import poison
from dspark.validate.runtime.scene import Arrangement, Part, Rows, Scene

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes of the pieces of free device memory that are overwritten, smallest to largest.
_PIECES = [2**power for power in range(9, 29)]
_PIECES_EACH = 4

Write = tuple[str, int]


def check_passes(
    model: Model,
    make_state: Callable[[], ModelState],
    parts: Sequence[Part],
    graphs: GraphPlan | None,
    block_size: int,
    name: str,
) -> Iterator[ProbeResult]:
    """Play requests in every arrangement.

    Args:
        model: what runs. make_state: a fresh state with twice as many slots as there are requests.
        parts: requests. graphs: how passes of fixed shape are launched, or None for ragged passes.
        block_size: draft tokens of a block, 0 without a draft.
        name: of the model, for the report.
    """
    wanted = Scene(model, make_state(), None, block_size).play(parts, _alone(parts))
    scene = Scene(model, make_state(), graphs, block_size)
    writes = _Writes()
    arrangements = {
        "alone, as in passes op by op": _alone(parts),
        "in other slots and pages": Arrangement(_alone(parts).batches, num_strangers=len(parts) // 2),
        "in any company and order": Arrangement(_shared(parts, "company"), num_strangers=2),
        "writing its own places only": Arrangement(_shared(parts, "writes"), around_pass=writes.watch),
        "beside rows and pages of no numbers": Arrangement(_shared(parts, "poison"), 1, before_pass=poison),
    }
    if model.target.embed.weight.device.type == "cuda":
        arrangements["beside free memory of no numbers"] = Arrangement(
            _shared(parts, "memory"), before_pass=lambda state: _poison_free_memory(state.device)
        )
    for what, arrangement in arrangements.items():
        found = scene.play(parts, arrangement)
        compared, wrong = _differing(found, wanted)
        message = f"{wrong} rows differ" if wrong else "every row has the bits that it has alone"
        if what.startswith("writing"):
            compared, wrong = writes.num_passes, wrong + len(writes.strays)
            message = writes.sentence() if writes.strays else "no pass wrote anywhere else"
        yield ProbeResult(f"{name}: {what}", wrong == 0, compared, message)


def _alone(parts: Sequence[Part]) -> Arrangement:
    return Arrangement(lambda turn: [[number] for number in range(len(parts))])


def _shared(parts: Sequence[Part], key: str) -> Callable[[int], list[list[int]]]:
    """Batches of random sizes in random order, other ones in every round."""

    def batches(turn: int) -> list[list[int]]:
        rng = random.Random(f"{key}/{turn}")
        numbers = list(range(len(parts)))
        rng.shuffle(numbers)
        found = []
        while numbers:
            count = rng.randint(1, len(numbers))
            found.append(numbers[:count])
            numbers = numbers[count:]
        return found

    return batches


def _differing(found: Sequence[Rows], wanted: Sequence[Rows]) -> tuple[int, int]:
    """Rows that were compared, and how many have other bits."""
    compared = wrong = 0
    for rows, others in zip(found, wanted, strict=True):
        for row, other in zip(rows, others, strict=True):
            for left, right in zip(row, other, strict=True):
                is_other = (_bits(left) != _bits(right)).any(-1)
                compared, wrong = compared + is_other.numel(), wrong + int(is_other.sum())
    return compared, wrong


def _bits(values: Tensor) -> Tensor:
    """The values as integers: one that is no number equals itself then."""
    return values.contiguous().view(_BITS[values.element_size()])


class _Writes:
    """Which places of the stores passes write.

    Attributes:
        num_passes: that were watched. strays: places that belong to none of the rows of a pass.
    """

    def __init__(self) -> None:
        self.num_passes = 0
        self.strays: list[Write] = []

    def watch(self, state: ModelState, spans: Sequence[SpanTokens]) -> Callable[[], None]:
        """Remember the stores; the result compares them with what is there after the pass.

        What nobody reads is overwritten first: padding writes the same values again and again.
        """
        poison(state)
        before = {name: store.clone() for name, store in _stores(state)}
        ranges = [(span.state, span.state.committed, span.state.committed + len(span.token_ids)) for span in spans]

        def compare() -> None:
            own = set(_own_places(state, ranges))
            for name, store in _stores(state):
                changed = (_bits(store) != _bits(before[name])).any(-1).flatten().nonzero().flatten().tolist()
                self.strays += [(name, place) for place in changed if (name, place) not in own]
            self.num_passes += 1

        return compare

    def sentence(self) -> str:
        """The first place that was written and should not have been."""
        name, place = self.strays[0]
        return f"{len(self.strays)} places of no row were written, the first is row {place} of {name}"


def _stores(state: ModelState) -> Iterator[tuple[str, Tensor]]:
    yield from state.rings.items()
    yield from ((f"{key} pages", rows) for key, rows in state.appends.items())


def _own_places(state: ModelState, ranges: Sequence[tuple[RequestState, int, int]]) -> Iterator[Write]:
    """Every place that rows of some positions of some requests may write."""
    rings = [ring.key for ring in state.geometry.windows] + [tail_key(ring.key) for ring in state.geometry.tails]
    for request, start, stop in ranges:
        for key in rings:
            count = state.rings[key].shape[1]
            yield from ((key, request.slot * count + position % count) for position in range(start, stop))
        for key, ratio in state.append_ratios.items():
            per_page = state.page_tokens // ratio
            for group in range(start // ratio, stop // ratio):
                yield f"{key} pages", request.pages[group // per_page] * per_page + group % per_page


def _poison_free_memory(device: torch.device) -> None:
    """Fill what the allocator would hand out next: a graph that reads memory which it does not hold reads this."""
    nan = float("nan")
    pieces = [torch.full((size // 4,), nan, device=device) for size in _PIECES for _ in range(_PIECES_EACH)]
    del pieces
