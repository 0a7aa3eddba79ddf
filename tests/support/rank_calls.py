"""Functions that ranks of a team run in tests; a follower finds them by their names."""

import os
import time
from dataclasses import dataclass

import torch

from dspark.engine.ranks.meeting import RankPlace


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
