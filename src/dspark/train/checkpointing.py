"""A run's resumable state on disk: weights, optimizer, step, time spent and random generators, written whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.config.errors import DSparkError

_FORMAT = 1
CHECKPOINT_NAME = "resume.pt"


@dataclass(frozen=True)
class RunState:
    """Everything that a continuation needs. The data position is the step itself.

    Attributes:
        step: steps done.
        elapsed_s: seconds spent.
        settings: what must be equal for a continuation to make sense, as plain values.
        weights: state dict of the trained module.
        optimizer: state of `TrainOptimizer`.
        generators: states of torch's random generators, by device kind.
        skipped: updates that were skipped for a non-finite gradient.
    """

    step: int
    elapsed_s: float
    settings: dict[str, Any]
    weights: dict[str, Any]
    optimizer: list[dict[str, Any]]
    generators: dict[str, torch.Tensor]
    skipped: int = 0


def generator_states() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators on this machine."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: dict[str, torch.Tensor]) -> None:
    """Set torch's generators to what `generator_states` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def write_state(folder: Path, state: RunState) -> Path:
    """Write the state so that an interruption leaves the previous one intact.

    Returns:
        The file's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CHECKPOINT_NAME
    partial = folder / f".{CHECKPOINT_NAME}.partial"
    try:
        with partial.open("wb") as file:
            torch.save({"format": _FORMAT, **vars(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_state(folder: Path, settings: dict[str, Any], device: torch.device | str = "cpu") -> RunState | None:
    """Read the state of a run, or None if the folder holds none.

    Args:
        folder: the run's folder.
        settings: of the run that wants to continue; must equal the saved ones.
        device: where the tensors go; generators stay on the host.

    Raises:
        DSparkError: the file is damaged, of another format, or belongs to a run with other settings.
    """
    path = folder / CHECKPOINT_NAME
    if not path.is_file():
        return None
    saved = _load(path, device)
    _require_equal(path, saved["settings"], settings)
    generators = {kind: tensor.cpu() for kind, tensor in saved.pop("generators").items()}
    return RunState(generators=generators, **saved)


def read_weights(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read only the weights of a run, whatever its settings were.

    Raises:
        DSparkError: the folder holds no run, or a damaged one.
    """
    path = folder / CHECKPOINT_NAME
    if not path.is_file():
        raise DSparkError(f"{folder} holds no {CHECKPOINT_NAME}: name the --out folder of a training run")
    weights: dict[str, Any] = _load(path, device)["weights"]
    return weights


def _load(path: Path, device: torch.device | str) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # damaged bytes surface as whatever the unpickler trips over
        raise DSparkError(f"{path} is damaged ({type(error).__name__}): delete it to start again") from error
    if saved.pop("format", None) != _FORMAT:
        raise DSparkError(f"{path} has another format: delete it to start again")
    return saved


def _require_equal(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = [key for key in sorted(saved.keys() | wanted.keys()) if saved.get(key) != wanted.get(key)]
    if differing:
        values = "; ".join(f"{key} was {saved.get(key)!r}, is {wanted.get(key)!r}" for key in differing)
        raise DSparkError(f"{path} belongs to a run with other settings ({values}): use them, or another --out")
