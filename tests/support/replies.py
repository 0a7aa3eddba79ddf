"""Replies of marked-up chat formats: written, cut into pieces, and put together again."""

import json
from dataclasses import dataclass, field

from dspark.serve.encoding.dialects import Dialect
from dspark.serve.encoding.dsml import DsmlParser


@dataclass
class Heard:
    """A reply put together from its deltas; calls are pairs of name and argument text."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def arguments(self, index=0):
        return json.loads(self.calls[index][1])


def parser_of(dialect: Dialect, **settings) -> DsmlParser:
    return DsmlParser(
        dialect, **{"thinks": False, "takes_calls": True, "make_id": lambda index: f"call-{index}"} | settings
    )


def hear(parser, pieces) -> Heard:
    """Push the pieces and put together what comes out; checks what every stream of deltas must keep."""
    heard = Heard()
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    for delta in [*deltas, *parser.finish()]:
        assert sum(map(bool, (delta.reasoning, delta.content, delta.tool_call))) == 1
        heard.reasoning += delta.reasoning
        heard.content += delta.content
        call = delta.tool_call
        if call is None:
            continue
        if call.index == len(heard.calls):
            assert call.id and call.name is not None
            heard.calls.append((call.name, call.arguments))
        else:
            assert call.index == len(heard.calls) - 1 and call.id is None and call.name is None
            name, arguments = heard.calls[-1]
            heard.calls[-1] = (name, arguments + call.arguments)
    assert parser.has_tool_calls == bool(heard.calls)
    return heard


def call_text(dialect: Dialect, name: str, *arguments: tuple[str, str, str]) -> str:
    """One call; an argument is (name, "true" | "false", value)."""
    lines = [
        f'<{dialect.parameter} name="{key}" string="{kind}">{value}</{dialect.parameter}>\n'
        for key, kind, value in arguments
    ]
    return f'<{dialect.invoke} name="{name}">\n{"".join(lines)}</{dialect.invoke}>\n'


def block_text(dialect: Dialect, *calls: str) -> str:
    return f"\n\n<{dialect.block}>\n{''.join(calls)}</{dialect.block}>"
