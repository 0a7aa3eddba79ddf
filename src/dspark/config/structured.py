"""StructuredOutput: the form that an output must have, checked as far as that needs no grammar library."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark.config.checks import require_choice
from dspark.config.errors import ConfigError

StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
STRUCTURED_KINDS: tuple[str, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")
# Far above what people write, and small enough that no text of a client keeps a compiler busy for long.
MAX_STRUCTURED_CHARS = 64 * 1024


@dataclass(frozen=True)
class StructuredOutput:
    """What the output of a request must match, token by token, from its first token to its end of sequence.

    Args:
        kind: "json_schema", "json_object" (any JSON object), "regex" (of the whole output), "choice" (one of some
            texts) or "grammar" (Lark).
        text: the schema as JSON text, the regular expression or the grammar; a tuple of texts for "choice"; empty for
            "json_object".

    Raises:
        ConfigError: the text does not belong to the kind, is empty or too long, or a schema is no JSON.
    """

    kind: StructuredKind
    text: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        require_choice("kind of structured output", self.kind, STRUCTURED_KINDS)
        if self.kind == "choice":
            object.__setattr__(self, "text", _as_choices(self.text))
        elif self.kind == "json_object":
            if self.text:
                raise ConfigError('structured output of the kind "json_object" takes no text: drop it')
        elif not isinstance(self.text, str) or not self.text.strip():
            raise ConfigError(f"structured output of the kind {self.kind!r} needs a non-empty text")
        self._require_short()
        if self.kind == "json_schema":
            _require_json(self.text)

    def _require_short(self) -> None:
        size = len(self.text) if isinstance(self.text, str) else sum(map(len, self.text))
        if size > MAX_STRUCTURED_CHARS:
            raise ConfigError(
                f"the {self.kind} of structured output has {size} characters and {MAX_STRUCTURED_CHARS} are admitted: "
                "shorten it"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "StructuredOutput":
        """JSON that a schema describes."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"the json_schema of structured output cannot be written as JSON: {error}") from None

    @classmethod
    def json_object(cls) -> "StructuredOutput":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> "StructuredOutput":
        """A regular expression that the whole output matches."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "StructuredOutput":
        """One of some texts."""
        return cls("choice", texts if isinstance(texts, str) else tuple(texts))

    @classmethod
    def grammar(cls, text: str) -> "StructuredOutput":
        """A grammar in Lark's notation; its rule `start` is the output."""
        return cls("grammar", text)


def _as_choices(texts: object) -> tuple[str, ...]:
    """Distinct non-empty strings; a single string would otherwise be read as its letters."""
    if not isinstance(texts, tuple | list) or not texts:
        raise ConfigError(f"structured output of the kind 'choice' needs a tuple of texts, not {texts!r:.80}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"the choices of structured output must be non-empty texts, not {text!r:.80}")
    return tuple(dict.fromkeys(texts))


def _require_json(text: str | tuple[str, ...]) -> None:
    """A schema is an object."""
    assert isinstance(text, str)
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ConfigError("the json_schema of structured output is nested too deeply: flatten it") from None
    except ValueError as error:
        raise ConfigError(f"the json_schema of structured output is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"the json_schema of structured output must be an object, not {schema!r:.80}")
