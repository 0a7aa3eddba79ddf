"""Verify lengths without rhyme or reason: the tokens must not depend on them."""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


class AnyLengths:
    """A length policy that draws each length, 0 included, from a seed."""

    uses_confidence = False

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, survival: ArrayLike, limits: Sequence[int] | None = None) -> list[int]:
        """Verify lengths [R]; survival [R, G] gives the largest."""
        num_requests, width = np.shape(survival)
        most = [width] * num_requests if limits is None else [min(width, limit) for limit in limits]
        return [self._rng.randint(0, limit) for limit in most]
