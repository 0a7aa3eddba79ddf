"""Verify lengths chosen where the confidences are: the policies of `dspark.speculative.lengths` as tensor operations.

A round that stays on the device needs its number of rows when it is launched, before the confidences that fill it
exist. So each policy is split in two: a bound that the host gives in advance, from what it knew a round or two
before, and a choice within that bound by the fresh survival. Lengths never change the tokens of keyed requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.ops.elementwise import sigmoid
from dspark.speculative.lengths import LengthPolicy, ThresholdLengths, ThroughputLengths


@dataclass(frozen=True)
class Bounds:
    """What the host allows the next proposal of R requests.

    Attributes:
        lengths: [R] drafts of each request at most.
        budget: drafts of all requests together at most.
    """

    lengths: list[int]
    budget: int


class DeviceLengths(Protocol):
    """A length policy in its two halves.

    Attributes:
        reads_survival: whether `bounds` does.
    """

    reads_survival: bool

    def bounds(self, num_requests: int, width: int, survival: NDArray[np.float64] | None) -> Bounds:
        """What is allowed, from the survival [R, G] of the last proposal that the host has seen."""
        ...

    def choose(self, confidence_logits: Tensor, limits: Tensor, budget: Tensor) -> Tensor:
        """Verify lengths [R] int64.

        Args:
            confidence_logits: [R, G] float32. limits: [R] largest length of each. budget: [1], of all together.
        """
        ...


def device_lengths(policy: LengthPolicy, temperatures: Sequence[float] | None) -> DeviceLengths | None:
    """A policy as it runs on the device; None where it reads confidences in a way that is not known here."""
    if isinstance(policy, ThresholdLengths):
        return ThresholdOnDevice(policy.threshold, _as_tuple(temperatures))
    if isinstance(policy, ThroughputLengths):
        return BudgetOnDevice(policy, _as_tuple(temperatures))
    return None if policy.uses_confidence else GivenLengths(policy)


@dataclass(frozen=True)
class GivenLengths:
    """A policy that does not read confidences decides on the host, in advance."""

    policy: LengthPolicy
    reads_survival = False

    def bounds(self, num_requests: int, width: int, survival: NDArray[np.float64] | None) -> Bounds:
        """See `DeviceLengths.bounds`."""
        lengths = self.policy.choose(np.ones((num_requests, width)))
        return Bounds(lengths, sum(lengths))

    def choose(self, confidence_logits: Tensor, limits: Tensor, budget: Tensor) -> Tensor:
        """See `DeviceLengths.choose`."""
        return limits


@dataclass(frozen=True)
class ThresholdOnDevice:
    """The prefix whose survival stays at or above the threshold: the same float64 numbers as on the host."""

    threshold: float
    temperatures: tuple[float, ...] | None
    reads_survival = False

    def bounds(self, num_requests: int, width: int, survival: NDArray[np.float64] | None) -> Bounds:
        """Every draft may be worth a row."""
        return Bounds([width] * num_requests, num_requests * width)

    def choose(self, confidence_logits: Tensor, limits: Tensor, budget: Tensor) -> Tensor:
        """See `DeviceLengths.choose`."""
        kept = torch.stack(survival_columns(confidence_logits, self.temperatures), dim=1) >= self.threshold
        return torch.minimum(kept.to(torch.int64).cumprod(1).sum(1), limits)


@dataclass(frozen=True)
class BudgetOnDevice:
    """The best drafts of all requests within a number of rows that Algorithm 1 chose from an earlier survival."""

    policy: ThroughputLengths
    temperatures: tuple[float, ...] | None
    reads_survival = True

    def bounds(self, num_requests: int, width: int, survival: NDArray[np.float64] | None) -> Bounds:
        """See `DeviceLengths.bounds`; before the first survival is known nothing is held back."""
        known = np.ones((num_requests, width)) if survival is None else survival
        return Bounds([width] * num_requests, sum(self.policy.choose(known)))

    def choose(self, confidence_logits: Tensor, limits: Tensor, budget: Tensor) -> Tensor:
        """Admit drafts by descending survival, ties to the lower request, then to the lower position."""
        survival = torch.stack(survival_columns(confidence_logits, self.temperatures), dim=1)
        width = survival.shape[1]
        is_allowed = torch.arange(width, device=limits.device) < limits.unsqueeze(-1)
        order = survival.masked_fill(~is_allowed, -1.0).flatten().argsort(descending=True, stable=True)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(order), device=order.device)
        return (is_allowed & (ranks.view_as(survival) < budget)).sum(1)


def survival_columns(confidence_logits: Tensor, temperatures: Sequence[float] | None) -> list[Tensor]:
    """`compute_survival` position by position: G float64 tensors [R] with the bits of the host's running product."""
    columns: list[Tensor] = []
    for k in range(confidence_logits.shape[1]):
        logits = confidence_logits[:, k].float()
        if temperatures is not None:
            # A division by a plain number may be a product with its reciprocal.
            logits = logits / torch.full_like(logits, temperatures[k])
        confidence = sigmoid(logits).double()
        columns.append(columns[-1] * confidence if columns else confidence)
    return columns


def _as_tuple(temperatures: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if temperatures is None else tuple(temperatures)
