"""Structured output: forms compiled by the grammar library within limits, the forms used last kept."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any, Protocol

import numpy as np

from dspark.config.errors import ConfigError
from dspark.config.structured import StructuredOutput
from dspark.engine.output_matcher import Cursor, OutputMatcher

_MAX_COMPILED = 32
# Work that one grammar may cause; a form within them compiles in tenths of a second and holds some 10 MB at most.
_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
# JSON may be spaced out, but a model that likes white space must not go on with it for ever.
_JSON_DEFAULTS = {"whitespace_flexible": True, "whitespace_pattern": "[ \\t\\n\\r]{1,16}"}
_TRIAL_TOKENS = 4
_MESSAGE_CHARS = 300


class Vocabulary(Protocol):
    """A tokenizer, as far as grammars need it."""

    def definition(self) -> Any:
        """The text of a tokenizer.json, or an object that the library takes for one."""
        ...


class GrammarCompiler:
    """Compiles forms over one vocabulary; the forms used last are kept. May be called from any thread.

    Args:
        tokenizer: read when the first form is compiled.
        eos_token_ids: ids that end an output.
        num_valid_tokens: V without padding.
    """

    def __init__(self, tokenizer: Vocabulary, eos_token_ids: Sequence[int], num_valid_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_valid_tokens = num_valid_tokens
        self._vocabulary: Any = None
        self._compiled: OrderedDict[StructuredOutput, Any] = OrderedDict()
        self._lock = Lock()

    def start(self, wanted: StructuredOutput, *, avoids_eos: bool = False) -> OutputMatcher:
        """The constraint of an output that is still empty.

        Args:
            wanted: its form.
            avoids_eos: the output does not end while it can go on.
        Raises:
            ConfigError: the form is wrong, too complex, or leaves nothing to say; or the library is missing.
        """
        with self._lock:
            compiled = self._compiled.get(wanted)
        # Outside of the lock: nobody waits for another's form, and a form compiled twice does no harm.
        matcher = self._keep(wanted, self._compile(wanted) if compiled is None else compiled)
        cursor = Cursor(matcher, lambda: self._keep(wanted, self._compile(wanted)))
        return OutputMatcher(cursor, self._num_valid_tokens, self._eos_token_ids, avoids_eos)

    def _keep(self, wanted: StructuredOutput, compiled: Any) -> Any:
        """Remember a compiled form as the last one used; returns a copy of it."""
        with self._lock:
            self._compiled[wanted] = compiled
            self._compiled.move_to_end(wanted)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def _compile(self, wanted: StructuredOutput) -> Any:
        library = _library()
        if not self._eos_token_ids:
            raise ConfigError("structured output needs an end-of-sequence id and this model names none")
        if self._vocabulary is None:
            self._vocabulary = library.LLTokenizer(self._tokenizer.definition(), eos_token=list(self._eos_token_ids))
        try:
            source = _source(library, wanted)
        except ValueError as error:
            raise _refusal(wanted, str(error)) from None
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        self._try_out(matcher.deep_copy(), wanted)
        return matcher

    def _try_out(self, matcher: Any, wanted: StructuredOutput) -> None:
        """Take some first tokens: limits show when the form is used, and some forms have no text at all."""
        for _ in range(_TRIAL_TOKENS):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            if matcher.is_error() or not allowed.any():
                raise _refusal(wanted, matcher.get_error() or "it allows no text")
            token = int(allowed.argmax())
            if token in self._eos_token_ids:
                return
            if not matcher.consume_token(token):
                raise _refusal(wanted, matcher.get_error())


def _library() -> Any:
    """The grammar library, an optional package."""
    if find_spec("llguidance") is None:
        raise ConfigError("structured output needs the package llguidance: pip install 'dspark[structured]'")
    return import_module("llguidance")


def _source(library: Any, wanted: StructuredOutput) -> str:
    """The form in the library's own notation."""
    build, text = library.LLMatcher, wanted.text
    match wanted.kind:
        case "json_schema":
            source = build.grammar_from_json_schema(text, defaults=_JSON_DEFAULTS)
        case "json_object":
            source = build.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_DEFAULTS)
        case "regex":
            source = build.grammar_from_regex(text)
        case "choice":
            source = build.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in text))
        case "grammar":
            source = build.grammar_from_lark(text)
    return str(source)


def _refusal(wanted: StructuredOutput, message: str) -> ConfigError:
    """The library's own words about a form."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("<")]
    said = " ".join(lines).replace("NoExtensionBias", "it allows no text")[:_MESSAGE_CHARS]
    return ConfigError(f"the {wanted.kind} of structured output cannot be used: {said.removeprefix('panic: ')}")
