"""The reply of a model that marks up its calls: thoughts, answer and calls, told apart while the text arrives.

thoughts</think>answer

<｜DSML｜ calls>
<｜DSML｜ invoke name="look_up">
<｜DSML｜ parameter name="word" string="true">tau</｜DSML｜ parameter>
<｜DSML｜ parameter name="limit" string="false">2</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>
"""

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple
from uuid import uuid4

from dspark.serve.encoding.deltas import DeltaList
from dspark.serve.encoding.dialects import THINK_END, Dialect
from dspark.serve.encoding.protocol import ReplyDelta

_SPACE = re.compile(r"\s*")
_WITH_KIND = re.compile(r'(?P<name>.*)" string="(?P<kind>true|false)"')
_NAME_ONLY = re.compile(r'(?P<name>.*)"')
# Stands in front of the block of calls and belongs to it.
_BEFORE_BLOCK = "\n\n"


class _Place(Enum):
    """Where in a reply the next character stands."""

    TEXT = auto()
    CALLS = auto()  # in the block, between calls
    CALL = auto()  # in a call, between arguments
    VALUE = auto()  # in an argument


class _Tag(NamedTuple):
    """An opening tag with the name that it gives, and whether its value is a string (None: not said)."""

    name: str
    is_string: bool | None
    end: int


class _Open(Enum):
    """Why no opening tag is read: more text is needed, or it is none."""

    WAIT = auto()
    NONE = auto()


class DsmlParser:
    """Tells the parts of a reply apart.

    Nothing a model writes is lost, whatever it writes: a block without a call in it, and text between the tags of a
    block, are content; a value that claims to be JSON and is not becomes a string, so that the arguments of a finished
    call are always one JSON object. Only white space between tags, and a tag that the end of the reply cuts off inside
    a block, are dropped. A call that the end cuts off keeps its arguments unfinished, for the client to see.

    Args:
        dialect: names of the tags.
        thinks: the reply begins with thoughts, which `</think>` ends.
        takes_calls: look for calls at all; without tools their markup is text like any other.
        starts_in_calls: the prompt has opened the block.
        make_id: id of the call with a number.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        thinks: bool,
        takes_calls: bool,
        starts_in_calls: bool = False,
        make_id: Callable[[int], str] | None = None,
    ) -> None:
        self._invoke = f'<{dialect.invoke} name="'
        self._invoke_end = f"</{dialect.invoke}>"
        self._parameter = f'<{dialect.parameter} name="'
        self._parameter_end = f"</{dialect.parameter}>"
        self._block = f"<{dialect.block}>"
        self._block_end = f"</{dialect.block}>"
        self._thinks = thinks
        self._takes_calls = takes_calls
        self._place = _Place.CALLS if starts_in_calls else _Place.TEXT
        self._make_id = make_id or _random_id
        self._held = ""
        self._out = DeltaList()
        self._value_is_string = False

    @property
    def has_tool_calls(self) -> bool:
        """See ReplyParser."""
        return self._out.num_calls > 0

    def push(self, text: str) -> list[ReplyDelta]:
        """See ReplyParser."""
        self._held += text
        steps = {
            _Place.TEXT: self._read_text,
            _Place.CALLS: self._read_calls,
            _Place.CALL: self._read_call,
            _Place.VALUE: self._read_value,
        }
        while self._held and steps[self._place]():
            pass
        return self._out.take()

    def finish(self) -> list[ReplyDelta]:
        """See ReplyParser."""
        held, self._held = self._held, ""
        if self._place is _Place.TEXT:
            self._say(held)
        elif self._place is _Place.VALUE:
            self._out.argue(_escape(held) if self._value_is_string else held)
        elif not self.has_tool_calls:
            self._out.say(held)
        return self._out.take()

    def _read_text(self) -> bool:
        """Text up to the next mark; True when something was read and there may be more."""
        marks = ([THINK_END] if self._thinks else []) + ([self._block] if self._takes_calls else [])
        found = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        if not found:
            self._say(self._cut(len(self._held) - self._num_held_back(marks)))
            return False
        place, mark = min(found)
        if mark == THINK_END:
            self._say(self._cut(place))
            self._cut(len(mark))
            self._thinks = False
            return True
        return self._read_block(place)

    def _read_block(self, place: int) -> bool:
        """The beginning of a block, which is one only when a call follows."""
        first_call = _SPACE.match(self._held, place + len(self._block))
        tag = self._open_tag(self._invoke, first_call.end() if first_call else place)
        before = place - len(_BEFORE_BLOCK) if self._held.endswith(_BEFORE_BLOCK, 0, place) else place
        if tag is _Open.WAIT:
            self._say(self._cut(before))
            return False
        if tag is _Open.NONE:
            self._say(self._cut(place + len(self._block)))
            return True
        self._say(self._cut(before))
        self._cut(place - before + len(self._block))
        self._place = _Place.CALLS
        return True

    def _read_calls(self) -> bool:
        """Between calls: the next call, or the end of the block."""
        return self._read_tags(self._invoke, self._begin_call, {self._block_end: self._leave_block})

    def _read_call(self) -> bool:
        """Between arguments: the next argument, or the end of the call, which may be left out."""
        start = _SPACE.match(self._held)
        if start and isinstance(self._open_tag(self._invoke, start.end()), _Tag):
            self._end_call()
            return True
        ends = {self._invoke_end: self._end_call, self._block_end: self._leave_block}
        return self._read_tags(self._parameter, self._begin_value, ends, also=self._invoke)

    def _read_tags(
        self, opening: str, begin: Callable[[_Tag], None], ends: dict[str, Callable[[], None]], also: str = ""
    ) -> bool:
        """White space and then a tag; other text is content, up to where a tag may begin."""
        match = _SPACE.match(self._held)
        start = match.end() if match else 0
        if start == len(self._held):
            return False
        for end, leave in ends.items():
            if self._held.startswith(end, start):
                self._cut(start + len(end))
                leave()
                return True
        tag = self._open_tag(opening, start)
        if isinstance(tag, _Tag):
            begin(tag)
            return True
        rest = self._held[start:]
        may_be_tag = any(mark.startswith(rest) for mark in ends) or (
            bool(also) and self._open_tag(also, start) is _Open.WAIT
        )
        if tag is _Open.WAIT or may_be_tag:
            return False
        self._out.say(self._cut(start + 1))
        return True

    def _read_value(self) -> bool:
        place = self._held.find(self._parameter_end)
        if place < 0:
            if self._value_is_string:
                ready = len(self._held) - _overlap(self._held, [self._parameter_end])
                self._out.argue(_escape(self._cut(ready)))
            return False
        value = self._cut(place)
        self._cut(len(self._parameter_end))
        if self._value_is_string:
            self._out.argue(_escape(value) + '"')
        else:
            self._out.argue(value if _is_json(value) else json.dumps(value, ensure_ascii=False))
        self._place = _Place.CALL
        return True

    def _begin_call(self, tag: _Tag) -> None:
        self._cut(tag.end)
        self._out.begin_call(self._make_id(self._out.num_calls), tag.name)
        self._place = _Place.CALL

    def _begin_value(self, tag: _Tag) -> None:
        self._cut(tag.end)
        # A value of unknown kind is read as JSON where it is JSON, and as text elsewhere.
        self._value_is_string = tag.is_string is True
        self._out.begin_argument(json.dumps(tag.name, ensure_ascii=False))
        if self._value_is_string:
            self._out.argue('"')
        self._place = _Place.VALUE

    def _end_call(self) -> None:
        self._out.end_call()
        self._place = _Place.CALLS

    def _leave_block(self) -> None:
        if self._place is _Place.CALL:
            self._out.end_call()
        self._place = _Place.TEXT

    def _open_tag(self, opening: str, start: int) -> _Tag | _Open:
        """The opening tag at a place; it stands in one line."""
        rest = self._held[start : start + len(opening)]
        if rest != opening:
            return _Open.WAIT if opening.startswith(rest) else _Open.NONE
        begin = start + len(opening)
        end = self._held.find(">", begin)
        line_end = self._held.find("\n", begin)
        if line_end >= 0 and (end < 0 or line_end < end):
            return _Open.NONE
        if end < 0:
            return _Open.WAIT
        inside = self._held[begin:end]
        match = _WITH_KIND.fullmatch(inside) or _NAME_ONLY.fullmatch(inside)
        if not match:
            return _Open.NONE
        kind = match.groupdict().get("kind")
        return _Tag(match["name"], None if kind is None else kind == "true", end + 1)

    def _num_held_back(self, marks: Sequence[str]) -> int:
        """Characters at the end of the text that may begin a mark."""
        blocks = [_BEFORE_BLOCK + self._block] if self._takes_calls else []
        return _overlap(self._held, [*marks, *blocks])

    def _say(self, text: str) -> None:
        """Thoughts or content, by where the reply stands."""
        if self._thinks:
            self._out.think(text)
        else:
            self._out.say(text)

    def _cut(self, size: int) -> str:
        """Take characters off the front of what is held."""
        front, self._held = self._held[:size], self._held[size:]
        return front


def _overlap(text: str, marks: Sequence[str]) -> int:
    """The longest end of a text that is the beginning, but not the whole, of a mark."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def _escape(text: str) -> str:
    """Characters as they stand inside a JSON string; each is escaped by itself, so pieces can be joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _random_id(index: int) -> str:
    """Ids are unique over the requests of a dialogue, which the model never sees."""
    return f"call_{index}_{uuid4().hex[:20]}"
