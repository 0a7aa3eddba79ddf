"""Finds branches of launches that touch what launches beside them write, without anything running side by side.

Launches happen in the order in which they are made. What each of them reads and writes is noted as spans of memory, and
a branch is held against everything else that was launched between its beginning and its join: that is what an
accelerator may run at the same time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.ops.branch import InOrder

Span = tuple[int, int]


@dataclass(frozen=True)
class Launch:
    """What was launched in a branch, or in none; reads are whatever it was given."""

    name: str
    branch: "WatchedBranch | None"
    reads: Sequence[Span]
    writes: Sequence[Span]

    def disturbs(self, other: "Launch") -> bool:
        """Whether one of the two writes what the other touches."""
        return _meet(self.writes, [*other.reads, *other.writes]) or _meet(other.writes, self.reads)


class RaceWatch(TorchDispatchMode):
    """Notes the launches of interpreted kernels and of torch while it is entered.

    Attributes:
        launches: in order.
        races: (branch, launch of it, launch beside it) that disturb each other.
        not_joined: names of branches that nobody has waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.races: list[tuple[str, str, str]] = []
        self.not_joined: set[str] = set()
        self._open: list[WatchedBranch] = []
        self._kept: list[Tensor] = []  # an accelerator's branches do not reuse each other's memory
        self._is_inside = False

    def branch(self, device: torch.device, name: str) -> "WatchedBranch":
        """In place of `OpSet.beside`."""
        return WatchedBranch(self, name)

    def note(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Remember a launch."""
        reads, writes = list(reads), list(writes)
        self._kept += [*reads, *writes]
        branch = self._open[-1] if self._open else None
        self.launches.append(Launch(name, branch, [_span(x) for x in reads], [_span(x) for x in writes]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        returns, given = func._schema.returns, [*args, *(kwargs or {}).values()]
        is_view = all(value.alias_info is not None and not value.alias_info.is_write for value in returns)
        if not (self._is_inside or is_view or "empty" in str(func)):
            mutated = [x for x, of in zip(given, func._schema.arguments, strict=False) if _is_written(of)]
            new = [] if any(value.alias_info is not None for value in returns) else _tensors(found)
            self.note(str(func), _tensors(given), [*_tensors(mutated), *new])
        return found

    def run_kernel(self, name: str, given: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Run an interpreted kernel; it has written what is not as it was."""
        tensors = _tensors(given)
        self._is_inside = True
        before = [tensor.clone() for tensor in tensors]
        found = run()
        changed = [x for x, old in zip(tensors, before, strict=True) if not _has_same_bytes(x, old)]
        self._is_inside = False
        self.note(name, tensors, changed)
        return found

    @contextmanager
    def watching(self, monkeypatch: Any) -> Iterator["RaceWatch"]:
        """See launches of the interpreter too."""
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def watched(grid: Any, *args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            return self.run_kernel(grid.fn.__name__, values, lambda: launch(grid, *args, **kwargs))

        monkeypatch.setattr(GridExecutor, "__call__", watched)
        with self:
            yield self


class WatchedBranch(InOrder):
    """A branch of a `RaceWatch`."""

    def __init__(self, watch: RaceWatch, name: str) -> None:
        self.name = name
        self._watch = watch
        self._entries: list[tuple[int, int]] = []

    def __enter__(self) -> "WatchedBranch":
        self._watch._open.append(self)
        self._watch.not_joined.add(self.name)
        self._entries.append((len(self._watch.launches), -1))
        return self

    def __exit__(self, *error: object) -> None:
        self._watch._open.remove(self)
        self._entries[-1] = self._entries[-1][0], len(self._watch.launches)

    def join(self) -> None:
        """Hold each stretch of the branch against what others have launched since it began."""
        self._watch.not_joined.discard(self.name)
        launches = self._watch.launches
        for begin, end in self._entries:
            for own in launches[begin:end]:
                beside = [other for other in launches[begin:] if other.branch is not self]
                found = [other.name for other in beside if own.branch is self and own.disturbs(other)]
                self._watch.races += [(self.name, own.name, name) for name in found]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.numel()]


def _span(tensor: Tensor) -> Span:
    """The bytes from a tensor's first element to its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def _meet(left: Iterable[Span], right: Sequence[Span]) -> bool:
    return any(a < d and c < b for a, b in left for c, d in right)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _has_same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
