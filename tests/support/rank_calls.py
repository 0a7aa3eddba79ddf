"""Functions that ranks of a team run in tests; a follower finds them by their names."""

import hashlib
import os
import time
from dataclasses import dataclass

import torch

from dspark.engine.ranks.meeting import RankPlace
from dspark.engine.ranks.part import RankPart
from dspark.models.build import Model
from dspark.validate.lifecycle.probe import ProbeResult


@dataclass
class Number:
    """A part that holds a number."""

    place: RankPlace
    value: float


def make_number(place: RankPlace, value: float) -> Number:
    return Number(place, value + place.seat.rank)


def make_larger(part: Number, by: float) -> Number:
    return Number(part.place, part.value + by)


def fail_on(place: RankPlace, rank: int) -> Number:
    if place.seat.rank == rank:
        raise ArithmeticError("no such number")
    return Number(place, 0.0)


def total(part: Number, added: float) -> float:
    """Sum over the ranks."""
    return float(part.place.group.sum(torch.tensor([part.value + added])))


def value(part: Number) -> float:
    return part.value


def add(part: Number, added: float) -> None:
    part.value += added


def stall(place: RankPlace, rank: int, seconds: float) -> None:
    """One rank does something else for a while."""
    if place.seat.rank == rank:
        time.sleep(seconds)


def process_id(place: RankPlace) -> int:
    return os.getpid()


def nothing(place: RankPlace, values: list[int]) -> None:
    """The cost of a call."""


def disturb_logits(part: RankPart, rank: int) -> None:
    """Let one rank see all logits in the reverse order of tokens."""
    target = part.model.target
    if target.ranks.rank == rank:
        logits = target.logits
        target.logits = lambda hidden: logits(hidden).flip(-1)


def restore_logits(part: RankPart, rank: int) -> None:
    """End what `disturb_logits` began."""
    if part.model.target.ranks.rank == rank:
        del part.model.target.logits


def traces(part: RankPart) -> dict[str, str]:
    """A digest of everything that a rank's requests have left: stores, columns of rounds and waiting drafts."""
    assert part.rounds is not None
    left = {**part.state.rings, **part.state.appends, "columns": part.rounds.buffers.table.words}
    return {
        str(name): hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, values in left.items()
    }


def found_on_one_rank(model: Model, *arguments: object) -> list[ProbeResult]:
    """As if the last rank's rows alone had other bits."""
    is_last = model.target.ranks.rank == model.target.ranks.size - 1
    return [ProbeResult("a check", not is_last, 3, "1 rows differ" if is_last else "every row has its bits")]


def tell_news(place: RankPlace) -> None:
    place.say(f"half of rank {place.seat.rank}'s work is done")
