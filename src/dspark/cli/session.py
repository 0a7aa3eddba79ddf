"""The engine of a command: opened once, with what the user should know about it said once."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from dspark.cli.console import note
from dspark.cli.options import DraftChoice
from dspark.config.errors import DSparkError
from dspark.engine import LLM

RUNNING = "running"


def open_llm(model: Path | None, draft: DraftChoice) -> LLM:
    """Load a model.

    Raises:
        DSparkError: the folder is missing, or what is in it cannot be run.
    """
    if model is not None and not model.is_dir():
        what = "is a file, not a folder" if model.exists() else "does not exist"
        raise DSparkError(f"the model {model} {what}: --model takes the folder of a checkpoint")
    llm = LLM(model, draft=draft.value)
    if draft is not DraftChoice.OFF and llm.speculation_status != RUNNING:
        note(f"speculation is {llm.speculation_status}")
    return llm


def model_folder(model: Path | None) -> Path:
    """The folder of a checkpoint; the embedded one for None."""
    return model if model is not None else Path(str(files("dspark"))) / "assets" / "embedded"


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


def decode_ids(llm: LLM, token_ids: Sequence[int]) -> str:
    """Text of tokens, special ones left out."""
    return str(llm.tokenizer.decode(list(token_ids)))


def encode_text(llm: LLM, text: str) -> list[int]:
    """Token ids of a text in which special tokens may be spelt out."""
    return list(llm.tokenizer.encode(text))
