"""Which chat format a checkpoint folder has."""

import json
from pathlib import Path
from typing import Any

from dspark.config.errors import DSparkError
from dspark.serve.chat_template import read_chat_template
from dspark.serve.encoding import dialects
from dspark.serve.encoding.deepseek import DeepSeekEncoding
from dspark.serve.encoding.protocol import ChatEncoding
from dspark.serve.encoding.template import TemplateEncoding


def chat_encoding(folder: Path) -> ChatEncoding:
    """The chat format of a checkpoint: that of its template, or else that of its family's releases.

    Args:
        folder: holds tokenizer_config.json and config.json.

    Raises:
        DSparkError: it has neither a template nor a family with a known format, or a file cannot be read.
    """
    try:
        return TemplateEncoding(read_chat_template(folder))
    except DSparkError:
        dialect = dialects.released_dialect(_model_type(folder), _encoder_text(folder))
        if dialect is None:
            raise
        return DeepSeekEncoding(dialect)


def _model_type(folder: Path) -> Any:
    """model_type of config.json, or None where there is no such file or name."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _encoder_text(folder: Path) -> str | None:
    """The encoder that a release ships beside its weights, read as text and never run."""
    for file in sorted((folder / "encoding").glob("encoding*.py")):
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
    return None
