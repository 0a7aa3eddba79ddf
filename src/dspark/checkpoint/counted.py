"""Tensors that are counted while they are read."""

from collections.abc import Callable, Mapping

from torch import Tensor

from dspark.checkpoint.folder import TensorSource
from dspark.checkpoint.header import TensorEntry

# Is told the bytes that are read, and those of all that will be.
OnRead = Callable[[int, int], None]


class CountedSource:
    """Another source, and how much of it has been read.

    Args:
        source: holds the tensors.
        total: bytes that are going to be read.
        on_read: told after every tensor.
    """

    def __init__(self, source: TensorSource, total: int, on_read: OnRead) -> None:
        self._source = source
        self._total = total
        self._on_read = on_read
        self._done = 0

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """See `TensorSource`."""
        return self._source.entries

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See `SafetensorsFolder.read`."""
        return self._counted(self._source.read(name, rows, columns))

    def mapped(self, name: str) -> Tensor:
        """See `SafetensorsFolder.mapped`; what the system will read later is read for those who are told."""
        return self._counted(self._source.mapped(name))

    def _counted(self, values: Tensor) -> Tensor:
        self._done += values.nbytes
        self._on_read(self._done, self._total)
        return values
