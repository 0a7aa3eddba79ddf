"""Messages to the text that a model was trained on, by the template in its tokenizer_config.json."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.config.errors import DSparkError

Message = Mapping[str, Any]
# Goes through a template inside a user's spelling of a token, so that it is not one afterwards. The character is none:
# the standard reserves it for use inside programs.
_BREAK = "\ufdd0"


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template and the tokens that it names.

    Args:
        source: the Jinja template; it runs in a sandbox, because it comes with the checkpoint.
        special_tokens: "bos_token" and the like, by name.
        added_tokens: spellings of all tokens that stand beside the vocabulary's words.
    """

    source: str
    special_tokens: dict[str, str]
    added_tokens: tuple[str, ...] = ()

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads from outside.

        Raises:
            DSparkError: the template is not valid Jinja.
        """
        try:
            return frozenset(find_undeclared_variables(_environment().parse(self.source)))
        except TemplateError as error:
            raise DSparkError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Message], extra: Mapping[str, Any] | None = None) -> str:
        """The text that asks the model for the next reply, special tokens spelt out.

        Args:
            messages: {"role": "system" | "user" | "assistant", "content": text}, oldest first.
            extra: further variables of the template, such as tools.

        Raises:
            DSparkError: the template refuses the messages.
        """
        try:
            template = _environment().from_string(self.source)
            return template.render(
                messages=list(messages), add_generation_prompt=True, **self.special_tokens, **(extra or {})
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise DSparkError(f"the model's chat template cannot render these messages: {error}") from error

    def pieces(self, messages: Sequence[Message], extra: Mapping[str, Any] | None = None) -> list[tuple[str, bool]]:
        """The same text in pieces, each with whether it is a token; one that a message spells is plain text.

        Raises:
            DSparkError: the template refuses the messages.
        """
        if not self.added_tokens:
            return [(self.render(messages, extra), False)]
        tokens = re.compile("|".join(map(re.escape, sorted(self.added_tokens, key=len, reverse=True))))
        text = self.render(_break_tokens(list(messages), tokens), _break_tokens(dict(extra or {}), tokens))
        pieces: list[tuple[str, bool]] = []
        place = 0
        for match in tokens.finditer(text):
            pieces += [(text[place : match.start()], False), (match[0], True)]
            place = match.end()
        pieces.append((text[place:], False))
        return [(part.replace(_BREAK, ""), is_token) for part, is_token in pieces if part]


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
    except (ValueError, RecursionError) as error:
        raise DSparkError(f"{file} is not JSON: {error}") from error
    source = settings.get("chat_template") if isinstance(settings, dict) else None
    if not isinstance(source, str):
        raise DSparkError(f"{file} holds no chat_template: this model continues text and does not chat")
    tokens = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token") and value}
    return ChatTemplate(source, tokens, _added_tokens(model))


def _added_tokens(model: Path) -> tuple[str, ...]:
    """Spellings of the added tokens of tokenizer.json; none where the file is missing or another kind."""
    try:
        listed = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        return tuple(token["content"] for token in listed if token["content"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment


def _break_tokens(value: Any, tokens: re.Pattern[str]) -> Any:
    """The same value with every token in its texts broken after the first character."""
    if isinstance(value, str):
        return tokens.sub(lambda match: match[0][0] + _BREAK + match[0][1:], value.replace(_BREAK, ""))
    if isinstance(value, Mapping):
        return {name: _break_tokens(item, tokens) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_break_tokens(item, tokens) for item in value]
    return value


def _token_text(value: Any) -> str:
    """A special token is a string, or an object that holds it as its content."""
    return value["content"] if isinstance(value, dict) else str(value)


def _refuse(reason: str) -> None:
    raise TemplateError(reason)
