"""Structured output: forms compiled by the grammar library, and the tokens that may come next in one output.

A lookahead runs on a copy, never by taking tokens back: a matcher of the library that was rolled back allows other
tokens afterwards than one that never went there, and the tokens of a request must not depend on its drafts. The price
of a copy grows with the output, so the masks that drafting has asked for are kept for the verification.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dspark.config.errors import ConfigError
from dspark.config.structured import StructuredOutput

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


class OutputMatcher:
    """The `TokenConstraint` of one output.

    Args:
        matcher: the library's, at the tokens taken so far.
        num_valid_tokens: V without padding.
        eos_token_ids: ids that end an output.
        avoids_eos: the output goes on while it can.
    """

    def __init__(self, matcher: Any, num_valid_tokens: int, eos_token_ids: Sequence[int], avoids_eos: bool) -> None:
        self._matcher = matcher
        self._num_valid_tokens = num_valid_tokens
        self._eos_token_ids = list(eos_token_ids)
        self._avoids_eos = avoids_eos
        self._scout: Any = None  # a copy of the matcher that has gone along _ahead
        self._ahead: list[int] = []
        self._masks: list[bytes] = []  # packed, before each token of _ahead and after the last

    def allowed(self, ahead: Sequence[int] = ()) -> Tensor | None:
        """See `TokenConstraint.allowed`; where nothing else is left, the end-of-sequence ids."""
        if not self._masks:
            self._masks.append(self._matcher.compute_bitmask())
        if self._ahead[: len(ahead)] != list(ahead) and not self._look(ahead):
            return None
        return self._unpacked(self._masks[len(ahead)])

    def _look(self, ahead: Sequence[int]) -> bool:
        """Send the scout along some tokens; False when one of them may not come."""
        known = len(self._ahead)
        if self._scout is None or self._ahead != list(ahead[:known]):
            self._scout, self._ahead, known = self._matcher.deep_copy(), [], 0
            del self._masks[1:]
        for token in ahead[known:]:
            if not self._unpacked(self._masks[-1])[token]:
                return False
            if not self._scout.consume_token(token):
                self._scout = None
                return False
            self._ahead.append(token)
            self._masks.append(self._scout.compute_bitmask())
        return True

    def _unpacked(self, packed: bytes) -> Tensor:
        """[V] bool of a mask of the library."""
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=self._num_valid_tokens, bitorder="little")
        allowed = torch.from_numpy(bits).to(torch.bool)
        if self._avoids_eos:
            others = allowed.clone()
            others[self._eos_token_ids] = False
            allowed = others if others.any() else allowed
        if not allowed.any():
            allowed[self._eos_token_ids] = True
        return allowed

    def advance(self, token_id: int) -> bool:
        """See `TokenConstraint.advance`."""
        self._scout, self._ahead, self._masks = None, [], []
        return bool(self._matcher.consume_token(token_id))

    def copy(self) -> OutputMatcher:
        """One that goes its own way from here."""
        return OutputMatcher(
            self._matcher.deep_copy(), self._num_valid_tokens, self._eos_token_ids, avoids_eos=self._avoids_eos
        )


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
        compiled = self._compile(wanted) if compiled is None else compiled
        with self._lock:
            self._compiled[wanted] = compiled
            self._compiled.move_to_end(wanted)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            matcher = compiled.deep_copy()
        return OutputMatcher(matcher, self._num_valid_tokens, self._eos_token_ids, avoids_eos)

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
