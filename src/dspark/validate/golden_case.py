"""A golden case on disk: a checkpoint, the token ids that a reference was fed, and what it computed."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dspark.config.errors import DSparkError

MODEL_FOLDER = "model"
# Name of a run: (the strict reference in fp32, where its exact integers lie if not there).
RUNS = {"long": ("io_f32.safetensors", "io.safetensors"), "short": ("io_short_f32.safetensors", None)}
REQUIRED = ("prompt_ids", "generated_ids", "prefill_logits", "decode_logits")


@dataclass(frozen=True)
class GoldenRun:
    """One prompt and its continuation, with the reference's numbers in fp32.

    Args:
        name: "long" or "short".
        prompt_ids: [P]. generated_ids: [N + 1], greedy; entry 0 follows the prompt.
        tensors: everything else by the reference's names.
    """

    name: str
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    tensors: dict[str, Tensor]

    def stable(self, part: str, num_rows: int) -> Tensor:
        """[num_rows] bool: rows that rounding noise did not move; all of them where the case says nothing."""
        return self.tensors.get(f"stable_{part}", torch.ones(num_rows, dtype=torch.bool))


@dataclass(frozen=True)
class GoldenCase:
    """A folder with a checkpoint and at least one run."""

    name: str
    model: Path
    runs: tuple[GoldenRun, ...]


def read_case(folder: Path) -> GoldenCase:
    """Read a golden folder.

    Raises:
        DSparkError: it is no golden folder, or a file in it is damaged or incomplete.
    """
    if not (folder / MODEL_FOLDER).is_dir():
        raise DSparkError(f"{folder} is no golden case: it has no folder {MODEL_FOLDER}/ with a checkpoint")
    runs = tuple(_read_run(folder, name) for name, (file, _) in RUNS.items() if (folder / file).is_file())
    if not runs:
        files = " nor ".join(file for file, _ in RUNS.values())
        raise DSparkError(f"{folder} is no golden case: it holds neither {files}")
    return GoldenCase(folder.name, folder / MODEL_FOLDER, runs)


def _read_run(folder: Path, name: str) -> GoldenRun:
    strict, integers = RUNS[name]
    tensors = _read_tensors(folder / strict)
    if integers is not None and (folder / integers).is_file():
        extra = _read_tensors(folder / integers)
        tensors |= {key: value for key, value in extra.items() if key.startswith(("engram_", "token_map"))}
    missing = [key for key in REQUIRED if key not in tensors]
    if missing:
        raise DSparkError(f"{folder / strict} lacks {', '.join(missing)}")
    prompt_ids, generated_ids = tensors.pop("prompt_ids").tolist(), tensors.pop("generated_ids").tolist()
    if not prompt_ids or len(generated_ids) < 2:
        raise DSparkError(f"{folder / strict} holds {len(prompt_ids)} prompt and {len(generated_ids)} generated ids")
    return GoldenRun(name, tuple(prompt_ids), tuple(generated_ids), tensors)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise DSparkError(f"{file} cannot be read: {error}") from error
