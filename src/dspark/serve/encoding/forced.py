"""The form of a reply that has to be calls, as a grammar: whatever follows it is read as calls of offered functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.serve.encoding.dialects import MARK, Dialect

# Far below what a structured output may be long. In a longer grammar, parameters may have any name.
_MAX_CHARS = 48_000
# Schemas with these may have more properties than they list.
_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")

# JSON as models write it. A character of every tag stays out of its strings: a tag would end the argument there.
_JSON = r"""
json: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" SPACE (pair ("," SPACE pair)*)? "}"
pair: STRING SPACE ":" SPACE json SPACE
array: "[" SPACE (json SPACE ("," SPACE json SPACE)*)? "]"
STRING: /"([^"\\\x00-\x1f%s]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"/
NUMBER: /-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?/
SPACE: /[ \n]{0,40}/
"""


def call_grammar(dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> str:
    """At least one call, each of an offered function with parameters that it has, to the end of the block.

    Args:
        dialect: names of the tags.
        tools: the functions; at least one.
    Returns:
        a grammar in Lark's notation of what follows the tag that opens the block.
    """
    grammar = _grammar(dialect, tools, [_parameter_names(tool) for tool in tools])
    return grammar if len(grammar) <= _MAX_CHARS else _grammar(dialect, tools, [None] * len(tools))


def _grammar(dialect: Dialect, tools: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str] | None]) -> str:
    parameter_end = _quoted(f"</{dialect.parameter}>")
    listed = {f"PARAMETER_{number}": each for number, each in enumerate(names) if each is not None}
    lines = [
        f"start: call+ {_quoted(f'</{dialect.block}>')}",
        f"call: {' | '.join(_call(dialect, tool, number, names[number]) for number, tool in enumerate(tools))}",
        *(f"{rule}: {_any_of(dialect, each)}" for rule, each in listed.items() if each),
        f"any_parameter: {_quoted(f'<{dialect.parameter} name=')} ANY_NAME value",
        r'ANY_NAME: /"[^"<>\n]+" string="/',
        f'value: ("true\\">" text | "false\\">" SPACE json SPACE {parameter_end}) "\\n"',
        # Any text at all; the first tag of this kind ends it.
        f"text[suffix={parameter_end}]: /(?s:.*)/",
    ]
    return "\n".join(lines) + _JSON % MARK[0]


def _call(dialect: Dialect, tool: Mapping[str, Any], number: int, names: Sequence[str] | None) -> str:
    """One call: its tags, and between them any of its parameters in any order."""
    parameters = "any_parameter*" if names is None else f"(PARAMETER_{number} value)*" if names else ""
    opening, end = f'<{dialect.invoke} name="{tool["name"]}">\n', f"</{dialect.invoke}>\n"
    return f'{_quoted(opening)} "\\n"? {parameters} {_quoted(end)}'


def _any_of(dialect: Dialect, names: Sequence[str]) -> str:
    """The tags that open some parameters, up to the kind of their values."""
    return " | ".join(_quoted(f'<{dialect.parameter} name="{name}" string="') for name in names)


def _parameter_names(tool: Mapping[str, Any]) -> list[str] | None:
    """Names of a function's parameters; None where its schema leaves them open or a tag could not hold them."""
    schema = tool.get("parameters") or {}
    properties = schema.get("properties")
    is_open = any(key in schema for key in _OPEN) or schema.get("additionalProperties", False) is not False
    if is_open or not isinstance(properties, Mapping):
        return [] if not is_open and "additionalProperties" in schema else None
    if any(not name or any(character in name for character in '"<>\n') for name in properties):
        return None
    return list(properties)


def _quoted(text: str) -> str:
    """A text as a grammar spells it."""
    return json.dumps(text)
