"""Ops that need not wait for those that are called next."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self


class Branch(Protocol):
    """What is called inside may run beside what is called after it, until `join`; its results are read behind that."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def join(self) -> None:
        """Let what is called next wait for the branch."""


class InOrder(AbstractContextManager["InOrder"]):
    """No branch: everything happens in the order in which it is called."""

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def join(self) -> None:
        """Nothing to wait for."""
