"""The engine of a command: opened once, with what the user should know about it said once."""

from pathlib import Path
from typing import Any

import torch

from dspark.cli.console import note
from dspark.cli.options import DraftChoice
from dspark.config import SpeculativeConfig
from dspark.config.errors import DSparkError
from dspark.engine import LLM, embedded_folder
from dspark.engine.core import RUNNING


def open_llm(
    model: Path | None, draft: DraftChoice, *, is_companion: bool = False, verifies_all: bool = False, **ranks: Any
) -> LLM:
    """Load a model, and tell the user what admission notes about it.

    Args:
        model: folder of a checkpoint; None is the embedded model.
        draft: who proposes tokens.
        is_companion: opened beside another engine on the same model, which has said it all.
        verifies_all: send every draft to the target, however unlikely; for measuring the drafter itself.
        ranks: the config's fields that divide the model.

    Raises:
        DSparkError: the folder is missing, or what is in it cannot be run.
    """
    require_folder(model)
    if verifies_all:
        llm = LLM(model, speculative_config=SpeculativeConfig(), **ranks)
    else:
        llm = LLM(model, draft=draft.value, **ranks)
    if not is_companion:
        for sentence in _notes(llm, draft):
            note(f"note: {sentence}")
    return llm


def require_folder(model: Path | None) -> None:
    """Refuse a --model that is no folder, before anything is loaded. Raises DSparkError."""
    if model is not None and not model.is_dir():
        what = "is a file, not a folder" if model.exists() else "does not exist"
        raise DSparkError(f"the model {model} {what}: --model takes the folder of a checkpoint")


def _notes(llm: LLM, draft: DraftChoice) -> list[str]:
    """Notes of admission, and why speculation does not run where it was wanted."""
    notes = list(llm.admission.notes)
    status = f"speculation is {llm.speculation_status}"
    if draft is not DraftChoice.OFF and llm.speculation_status != RUNNING and not _is_said(status, notes):
        notes.append(f"{status}.")
    return notes


def _is_said(sentence: str, notes: list[str]) -> bool:
    return any(said.startswith(sentence) for said in notes)


def model_folder(model: Path | None) -> Path:
    """The folder of a checkpoint; the embedded one for None."""
    return model if model is not None else embedded_folder()


def model_name(model: Path | None) -> str:
    """What reports call a model."""
    return "the embedded model" if model is None else model.name


def require_speculation(llm: LLM, command: str) -> None:
    """Refuse a comparison that would compare plain decoding with itself.

    Raises:
        DSparkError: speculation is not running; says why.
    """
    if llm.speculation_status != RUNNING:
        raise DSparkError(f"{command} compares with DSpark, but speculation is {llm.speculation_status}")


def prompt_ids(llm: LLM, text: str) -> list[int]:
    """Token ids of a text, special tokens spelt out or not; the one that begins every document comes first."""
    token_ids = llm.tokenizer.encode(text)
    begin = llm.plan.bos_token_id
    return token_ids if token_ids[:1] == [begin] else [begin, *token_ids]


def device_of(llm: LLM) -> torch.device:
    """Where an engine runs."""
    return torch.device(llm.device)
