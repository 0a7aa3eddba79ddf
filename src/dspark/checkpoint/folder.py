"""A checkpoint folder of safetensors shards: opened by its metadata only, read lazily by tensor, rows or columns."""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from dspark.checkpoint.dtypes import TORCH_DTYPES
from dspark.checkpoint.header import TensorEntry, parse_json_object, read_header
from dspark.config.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
# Rows of a column slice pass through a buffer of about this size.
_COLUMN_CHUNK_BYTES = 4 << 20


class TensorSource(Protocol):
    """Named tensors that can be read one at a time, whole or in part."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor: ...

    def mapped(self, name: str) -> Tensor: ...


class SafetensorsFolder:
    """The tensors of one checkpoint, by name. A context manager; open files are closed at its end.

    Args:
        folder: where config.json, the index and the shards lie. A folder without an index but with a single
            model.safetensors is a checkpoint too.

    Raises:
        CheckpointError: any shard is missing, truncated or corrupt, or index and shards disagree; names the file and
            the tensor. Nothing of the payload has been read by then.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files: dict[Path, FileIO] = {}
        self.index_total_bytes: int | None = None
        self._entries = self._open()

    def _open(self) -> dict[str, TensorEntry]:
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder; give one with {CONFIG_NAME} and its shards")
        index = self.folder / INDEX_NAME
        if index.is_file():
            weight_map, self.index_total_bytes = read_index(index)
            return _merge_shards(index, weight_map)
        single = self.folder / SINGLE_NAME
        if single.is_file():
            return {entry.name: entry for entry in read_header(single)}
        shards = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if shards:
            raise CheckpointError(f"{index}: missing, though there are shards ({shards[0]} ...); copy the index too")
        raise CheckpointError(f"{self.folder}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors by name, in no promised order."""
        return self._entries

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all tensors."""
        return sum(entry.num_bytes for entry in self._entries.values())

    @property
    def stray_files(self) -> tuple[str, ...]:
        """Shards that lie in the folder and belong to nothing, by name: they are ignored."""
        used = {entry.file.name for entry in self._entries.values()}
        return tuple(sorted(path.name for path in self.folder.glob("*.safetensors") if path.name not in used))

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """One tensor, or a part of it; only the bytes of the rows asked for are read.

        Args:
            name: of the tensor.
            rows: contiguous range of the first dimension.
            columns: contiguous range of the second dimension of a matrix.

        Raises:
            CheckpointError: no such tensor, a range outside it, or the file ended early.
        """
        entry = self._entry(name)
        if rows is None and columns is None:
            return self._read_span(entry, entry.offset, entry.shape)
        if not entry.shape:
            raise CheckpointError(f"{entry.file}: tensor {name} is a scalar and has no rows")
        first, last = _bounds(entry, rows, entry.shape[0])
        if columns is None:
            return self._read_rows(entry, first, last)
        if len(entry.shape) != 2:
            raise CheckpointError(f"{entry.file}: tensor {name} of shape {list(entry.shape)} has no columns to slice")
        return self._read_columns(entry, (first, last), _bounds(entry, columns, entry.shape[1]))

    def mapped(self, name: str) -> Tensor:
        """A tensor whose bytes stay in the file, of which the system reads what is looked at. It must not be written.

        Raises:
            CheckpointError: no such tensor, or its bytes lie where values of its type cannot.
        """
        entry = self._entry(name)
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.offset % dtype.itemsize:
            raise CheckpointError(f"{entry.file}: tensor {name} does not lie at a multiple of {dtype.itemsize} bytes")
        stop = entry.offset + entry.num_bytes
        content = torch.from_file(str(entry.file), shared=False, size=stop, dtype=torch.uint8)
        return content[entry.offset :].view(dtype).view(entry.shape)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise CheckpointError(f"{self.folder}: no tensor {name}")
        return self._entries[name]

    def _read_rows(self, entry: TensorEntry, first: int, last: int) -> Tensor:
        row_bytes = entry.num_bytes // entry.shape[0] if entry.shape[0] else 0
        return self._read_span(entry, entry.offset + first * row_bytes, (last - first, *entry.shape[1:]))

    def _read_columns(self, entry: TensorEntry, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        row_bytes = max(1, entry.num_bytes // max(1, entry.shape[0]))
        step = max(1, _COLUMN_CHUNK_BYTES // row_bytes)
        part = torch.empty((rows[1] - rows[0], columns[1] - columns[0]), dtype=TORCH_DTYPES[entry.dtype])
        for start in range(rows[0], rows[1], step):
            stop = min(start + step, rows[1])
            chunk = self._read_rows(entry, start, stop)
            part[start - rows[0] : stop - rows[0]] = chunk[:, columns[0] : columns[1]]
        return part

    def _read_span(self, entry: TensorEntry, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Bytes from `offset` of the file as a tensor of its own memory."""
        dtype = TORCH_DTYPES[entry.dtype]
        storage = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        try:
            self._read_into(entry, offset, storage.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{entry.file}: tensor {entry.name} cannot be read ({error.strerror})") from error
        return storage.view(dtype).view(shape)

    def _read_into(self, entry: TensorEntry, offset: int, storage: memoryview) -> None:
        file, done = self._opened(entry.file), 0
        file.seek(offset)
        while done < len(storage):
            # One read returns 2 GiB at most, and may return less.
            count = file.readinto(storage[done:])
            if not count:
                raise CheckpointError(f"{entry.file}: ended inside tensor {entry.name}; copy the file again")
            done += count

    def _opened(self, file: Path) -> FileIO:
        if file not in self._files:
            self._files[file] = FileIO(file)
        return self._files[file]

    def close(self) -> None:
        """Close the shards; a later read opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_index(index: Path) -> tuple[dict[str, str], int | None]:
    """The weight map (tensor -> shard file name) of an index, and its total_size where it states one.

    Raises:
        CheckpointError: the index is corrupt or names a file outside its folder.
    """
    try:
        parsed = parse_json_object(index, index.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror})") from error
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: corrupt, weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index}: tensor {name} points to {shard!r}, which is no shard of this folder")
    metadata = parsed.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int) else None


def release_fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256 over config.json and the index: two folders of one release have the same, whatever their path."""
    digest = hashlib.sha256()
    for name in (CONFIG_NAME, INDEX_NAME):
        file = Path(folder) / name
        content = file.read_bytes() if file.is_file() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def metadata_digests(folder: str | os.PathLike[str]) -> dict[str, str]:
    """SHA-256 of config.json and of the index, by file name; they identify metadata, not every weight."""
    files = (Path(folder) / name for name in (CONFIG_NAME, INDEX_NAME))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def _merge_shards(index: Path, weight_map: dict[str, str]) -> dict[str, TensorEntry]:
    """The entries of all shards, after checking that index and shards name the same tensors in the same files."""
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        file = index.parent / shard
        if not file.is_file():
            orphans = [name for name, owner in weight_map.items() if owner == shard]
            raise CheckpointError(
                f"{file}: missing shard, which holds {orphans[0]} and {len(orphans) - 1} more; copy it"
            )
        for entry in read_header(file):
            if entry.name in entries:
                raise CheckpointError(f"{file}: tensor {entry.name} is also in {entries[entry.name].file.name}")
            entries[entry.name] = entry
    for fault in _index_faults(index, weight_map, entries):
        raise CheckpointError(fault)
    return entries


def _index_faults(index: Path, weight_map: dict[str, str], entries: dict[str, TensorEntry]) -> Iterator[str]:
    for name, shard in weight_map.items():
        if name not in entries:
            yield f"{index}: tensor {name} is said to be in {shard}, which does not hold it"
        elif entries[name].file.name != shard:
            yield f"{index}: tensor {name} is said to be in {shard} but is in {entries[name].file.name}"
    for name, entry in entries.items():
        if name not in weight_map:
            yield f"{entry.file}: tensor {name} is not in {index.name}"


def _bounds(entry: TensorEntry, part: slice | None, size: int) -> tuple[int, int]:
    if part is None:
        return 0, size
    first, last = part.start or 0, size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= first <= last <= size:
        raise CheckpointError(f"{entry.file}: tensor {entry.name} has {size} rows or columns there, not {first}:{last}")
    return first, last
