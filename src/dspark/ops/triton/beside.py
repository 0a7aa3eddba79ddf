"""Launches that need not wait for each other: a second branch of a graph while it is captured."""

from contextlib import ExitStack
from functools import lru_cache
from types import TracebackType

import torch


class Beside:
    """A branch that starts behind everything launched so far and runs beside what follows, until `join`.

    Only a graph has branches; where none is being captured, the launches run in the order in which they are made.
    Tensors made inside belong to the branch; they are read after `join` only. Branches of one name follow each other.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._stream = _side_stream(device, name) if is_captured else None
        self._scope = ExitStack()

    def __enter__(self) -> "Beside":
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._scope.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.close()

    def join(self) -> None:
        """Let what is launched next wait for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@lru_cache(maxsize=16)
def _side_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
