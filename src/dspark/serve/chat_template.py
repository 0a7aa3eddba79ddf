"""Messages to the text that a model was trained on, by the template in its tokenizer_config.json."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.config.errors import DSparkError

Message = dict[str, str]


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template and the special tokens that it names.

    Args:
        source: the Jinja template; it runs in a sandbox, because it comes with the checkpoint.
        special_tokens: "bos_token" and the like, by name.
    """

    source: str
    special_tokens: dict[str, str]

    def render(self, messages: Sequence[Message]) -> str:
        """The text that asks the model for the next reply, special tokens spelt out.

        Args:
            messages: {"role": "system" | "user" | "assistant", "content": text}, oldest first.

        Raises:
            DSparkError: the template refuses the messages.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self.source)
            return template.render(messages=list(messages), add_generation_prompt=True, **self.special_tokens)
        except TemplateError as error:
            raise DSparkError(f"the model's chat template cannot render these messages: {error}") from error


def read_chat_template(model: Path) -> ChatTemplate:
    """Read the template of a checkpoint folder.

    Raises:
        DSparkError: there is no tokenizer_config.json, it is not JSON, or it holds no template.
    """
    file = model / "tokenizer_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DSparkError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DSparkError(f"{file} is not JSON: {error}") from error
    source = settings.get("chat_template") if isinstance(settings, dict) else None
    if not isinstance(source, str):
        raise DSparkError(f"{file} holds no chat_template: this model continues text and does not chat")
    tokens = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token") and value}
    return ChatTemplate(source, tokens)


def _token_text(value: Any) -> str:
    """A special token is a string, or an object that holds it as its content."""
    return value["content"] if isinstance(value, dict) else str(value)


def _refuse(reason: str) -> None:
    raise TemplateError(reason)
