"""The header of one safetensors file, checked in full before a byte of payload is used."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.checkpoint.dtypes import TORCH_DTYPES, tensor_bytes
from dspark.config.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_SIZE = 2**48
METADATA_KEY = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: file, first byte in the file, shape and dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file in payload order.

    The file is 8 bytes of little-endian header length h, h bytes of JSON, then the payload: tensors back to back
    without gap or overlap, up to the last byte. A tensor with data_offsets [16, 48] in a file with h = 200 lies at
    bytes 8 + 200 + 16 = 224 to 256 of the file.

    Raises:
        CheckpointError: the file cannot be read, is cut short or corrupt; names the file and, where one is at fault,
            the tensor.
    """
    try:
        file_bytes = os.path.getsize(file)
        with open(file, "rb") as stream:
            prefix = stream.read(LENGTH_BYTES)
            header_len = _header_len(file, prefix, file_bytes)
            text = stream.read(header_len)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from error
    if len(text) != header_len:
        raise CheckpointError(f"{file}: truncated inside its header; copy the file again")
    payload_start = LENGTH_BYTES + header_len
    entries = [
        _entry(file, name, fields, payload_start)
        for name, fields in parse_json_object(file, text).items()
        if name != METADATA_KEY
    ]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    _check_layout(file, entries, payload_start, file_bytes)
    return entries


def parse_json_object(file: Path, text: bytes) -> dict[str, Any]:
    """A JSON object in which no key stands twice.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, or a repeated key.
    """
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(file, pairs))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: corrupt, its JSON cannot be parsed ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: corrupt, a JSON object was expected")
    return parsed


def _unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{file}: corrupt, {repeated} stands twice")
    return seen


def _header_len(file: Path, prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{file}: truncated, {file_bytes} bytes cannot hold a safetensors header")
    if prefix == b"version ":
        raise CheckpointError(f"{file}: a Git LFS pointer, not the weights; fetch the file itself (git lfs pull)")
    header_len = int.from_bytes(prefix, "little")
    if header_len > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise CheckpointError(
            f"{file}: truncated or not safetensors, its header of {header_len} bytes does not fit a file of "
            f"{file_bytes} bytes"
        )
    return header_len


def _entry(file: Path, name: str, fields: Any, payload_start: int) -> TensorEntry:
    problem = f"{file}: corrupt header, tensor {name}"
    if not isinstance(fields, dict):
        raise CheckpointError(f"{problem}: an object was expected")
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise CheckpointError(f"{problem}: dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{problem}: {shape!r} is not a shape")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{problem}: {offsets!r} are not data_offsets")
    wanted = tensor_bytes(dtype, shape)
    if offsets[1] - offsets[0] != wanted:
        raise CheckpointError(f"{problem}: {dtype} {shape} takes {wanted} bytes, not those of data_offsets {offsets}")
    return TensorEntry(name, dtype, tuple(shape), file, payload_start + offsets[0])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_SIZE for value in values)


def _check_layout(file: Path, entries: list[TensorEntry], payload_start: int, file_bytes: int) -> None:
    """Tensors must fill the payload exactly: a hole or an overlap means that some offset is wrong."""
    end, before = payload_start, "the header"
    for entry in entries:
        if entry.offset != end:
            fault = "overlaps" if entry.offset < end else "leaves a gap after"
            raise CheckpointError(f"{file}: corrupt header, tensor {entry.name} {fault} {before}")
        end, before = entry.offset + entry.num_bytes, entry.name
    if end > file_bytes:
        cut = next(_beyond(entries, file_bytes))
        raise CheckpointError(
            f"{file}: truncated, {file_bytes} bytes of {end}; tensor {cut} is not whole; copy the file again"
        )
    if end < file_bytes:
        raise CheckpointError(f"{file}: corrupt, {file_bytes - end} bytes behind the last tensor")


def _beyond(entries: list[TensorEntry], file_bytes: int) -> Iterator[str]:
    return (entry.name for entry in entries if entry.offset + entry.num_bytes > file_bytes)
