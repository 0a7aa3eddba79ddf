"""Writes a checkpoint in the official sharded layout: the whole folder appears at once, or not at all."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dspark.checkpoint.dtypes import DTYPE_NAMES
from dspark.checkpoint.folder import INDEX_NAME
from dspark.config.errors import CheckpointError

DEFAULT_SHARD_BYTES = 4 << 30
_SHARD_NAME = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def write_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write tensors as model-0000x-of-0000y.safetensors with an index, and other files beside them.

    Everything goes into a temporary sibling that is renamed at the end, so an interruption leaves no half-written
    folder. At most one shard of tensors is held.

    Args:
        folder: to create.
        tensors: names and tensors, consumed once.
        files: further files by name: config.json, tokenizer.json ...
        max_shard_bytes: payload of a shard at most; a larger tensor gets a shard of its own.
        overwrite: replace an existing folder; one that holds anything but a checkpoint's files is refused all the same.

    Raises:
        CheckpointError: the folder exists or cannot be made, a name stands twice, or a dtype does not fit the layout.
    """
    target = Path(folder).resolve()
    if target.exists():
        if not overwrite:
            raise CheckpointError(f"{target}: exists already; choose another folder or ask to overwrite it")
        _require_replaceable(target, files or {})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    try:
        _write_into(workspace, tensors, files or {}, max_shard_bytes)
        workspace.chmod(0o755)
        _put_in_place(workspace, target)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return target


def _require_replaceable(target: Path, files: Mapping[str, bytes]) -> None:
    """Refuse a target whose replacement would lose more than an earlier checkpoint."""
    if not target.is_dir():
        raise CheckpointError(f"{target}: is a file, not a folder; choose another name")
    for path in sorted(target.iterdir()):
        is_expected = path.name == INDEX_NAME or path.name in files or _SHARD_NAME.fullmatch(path.name)
        if path.is_dir() or not is_expected:
            raise CheckpointError(
                f"{target}: holds {path.name}, which is no checkpoint file and would be lost; choose another folder"
            )


@dataclass
class _Shards:
    """Collects tensors and writes a shard whenever the next tensor would not fit."""

    folder: Path
    max_bytes: int
    pending: dict[str, Tensor] = field(default_factory=dict)
    pending_bytes: int = 0
    total_bytes: int = 0
    names: list[list[str]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self.seen:
            raise CheckpointError(f"tensor {name} is written twice")
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}, which the layout cannot hold")
        if self.pending and self.pending_bytes + tensor.nbytes > self.max_bytes:
            self.flush()
        self.seen.add(name)
        # A tensor that shares memory with another, or is a view, cannot be stored as it stands.
        self.pending[name] = tensor.detach().cpu().contiguous().clone()
        self.pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def flush(self) -> None:
        if not self.pending:
            return
        save_file(self.pending, self.folder / f"part-{len(self.names)}", metadata={"format": "pt"})
        self.names.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0


def _write_into(
    workspace: Path, tensors: Iterable[tuple[str, Tensor]], files: Mapping[str, bytes], max_shard_bytes: int
) -> None:
    shards = _Shards(workspace, max_shard_bytes)
    for name, tensor in tensors:
        shards.add(name, tensor)
    shards.flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards.names):
        shard = f"model-{number + 1:05d}-of-{len(shards.names):05d}.safetensors"
        (workspace / f"part-{number}").rename(workspace / shard)
        (workspace / shard).chmod(0o644)  # as readable as the files beside it
        weight_map.update(dict.fromkeys(names, shard))
    index = {"metadata": {"total_size": shards.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (workspace / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for name, content in files.items():
        if Path(name).name != name or (workspace / name).exists():
            raise CheckpointError(f"{name!r} is no name for a file beside the shards")
        (workspace / name).write_bytes(content)


def _put_in_place(workspace: Path, target: Path) -> None:
    """Rename; an existing target steps aside first, and comes back if the rename fails."""
    aside = workspace.with_name(workspace.name + ".replaced")
    if target.exists():
        target.rename(aside)
    try:
        workspace.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
