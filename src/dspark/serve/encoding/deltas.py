"""The parts of a reply, in order, joined where neighbours are of one kind."""

from dataclasses import replace

from dspark.serve.encoding.protocol import ReplyDelta, ToolCallDelta


class DeltaList:
    """Collects deltas between two calls of `take`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._deltas: list[ReplyDelta] = []
        self._num_arguments = 0

    def think(self, text: str) -> None:
        """Add to the thoughts."""
        if text and self._deltas and self._deltas[-1].reasoning:
            text = self._deltas.pop().reasoning + text
        self._add(ReplyDelta(reasoning=text), text)

    def say(self, text: str) -> None:
        """Add to the answer."""
        if text and self._deltas and self._deltas[-1].content:
            text = self._deltas.pop().content + text
        self._add(ReplyDelta(content=text), text)

    def begin_call(self, call_id: str, name: str) -> None:
        """Begin the next call."""
        call = ToolCallDelta(self.num_calls, call_id, name, "")
        self._deltas.append(ReplyDelta(tool_call=call))
        self.num_calls += 1
        self._num_arguments = 0

    def begin_argument(self, name: str) -> None:
        """Begin an argument of the call; the name is JSON."""
        self.argue(f"{', ' if self._num_arguments else '{'}{name}: ")
        self._num_arguments += 1

    def end_call(self) -> None:
        """Close the call's JSON object."""
        self.argue("}" if self._num_arguments else "{}")

    def argue(self, text: str) -> None:
        """Add to the arguments of the call, which are the text of a JSON object."""
        last = self._deltas[-1].tool_call if self._deltas else None
        if text and last is not None and last.index == self.num_calls - 1:
            self._deltas[-1] = ReplyDelta(tool_call=replace(last, arguments=last.arguments + text))
            return
        self._add(ReplyDelta(tool_call=ToolCallDelta(self.num_calls - 1, None, None, text)), text)

    def take(self) -> list[ReplyDelta]:
        """What was collected since the last time."""
        taken, self._deltas = self._deltas, []
        return taken

    def _add(self, delta: ReplyDelta, text: str) -> None:
        if text:
            self._deltas.append(delta)
