"""The words of the two released chat formats, as data.

Releases of these families ship no Jinja template; their chat format is code beside the weights (encoding/). What
follows is what a model was trained to read, so it is reproduced to the character, odd spacing and all: the texts are
data of the wire format, not documentation. Established against the publisher's own encoder, which the tests' expected
prompts come from. Two features of the releases are left out: tokens for internal classification tasks, and images.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dspark.config.errors import DSparkError

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
MARK = "｜DSML｜"

_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{block}>" \
block like the following:

<{block}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$TOOL_NAME2">
...
</{invoke}>
</{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

_EFFORT_LONG = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_EFFORT_LONGEST = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
_EFFORT_BUDGET = "Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
# Also the mark by which an encoder file shows that it knows this level.
LONGEST_EFFORT_MARK = "Beyond maximum"


@dataclass(frozen=True)
class Dialect:
    """One release's chat format.

    Args:
        block: tag around all calls of a reply, the mark included.
        invoke: tag around one call.
        parameter: tag around one argument.
        empty_arguments: what stands between the lines of a call's tags when it has no arguments.
        has_system_token: system messages have a token and stay in their places; without one they all come first, as
            one text.
        joins_empty_texts: an empty one of several user messages in a row still has its blank line.
        efforts: text that begins the prompt of a thinking model, by effort.
        takes_budget: the effort may also be a number from 1 to 100.
        json_reply: text that asks for a JSON object without a schema.
    """

    block: str
    invoke: str
    parameter: str
    empty_arguments: str
    has_system_token: bool
    joins_empty_texts: bool
    efforts: Mapping[str, str]
    takes_budget: bool
    json_reply: str

    @property
    def tools(self) -> str:
        """The text in front of the tools' schemas."""
        return _TOOLS.format(block=self.block, invoke=self.invoke, parameter=self.parameter)

    def effort_text(self, effort: str | int | None) -> str:
        """The text of an effort, by name or number; "high" is the releases' default.

        Raises:
            DSparkError: there is no such effort.
        """
        if isinstance(effort, int) and not isinstance(effort, bool) and self.takes_budget and 1 <= effort <= 100:
            return _EFFORT_BUDGET.format(budget=effort)
        text = self.efforts.get("high" if effort is None else effort) if isinstance(effort, str | None) else None
        if text is None:
            numbers = ", or a number from 1 to 100" if self.takes_budget else ""
            raise DSparkError(
                f"reasoning_effort is {effort!r}: this model knows none, {', '.join(self.efforts)}{numbers}"
            )
        return text


def _budgets(**budgets: int) -> Mapping[str, str]:
    return {name: _EFFORT_BUDGET.format(budget=budget) for name, budget in budgets.items()}


V4 = Dialect(
    block=f"{MARK}tool_calls",
    invoke=f"{MARK}invoke",
    parameter=f"{MARK}parameter",
    empty_arguments="",
    has_system_token=False,
    joins_empty_texts=False,
    efforts={
        "minimal": "",
        "low": "",
        "medium": _EFFORT_LONG,
        "high": _EFFORT_LONG,
        "xhigh": _EFFORT_LONG,
        "max": _EFFORT_LONGEST,
    },
    takes_budget=False,
    json_reply=(
        "You are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
    ),
)
# The first releases of the family call "max" what later ones call "high", and know nothing longer.
V4_PREVIEW = Dialect(
    block=V4.block,
    invoke=V4.invoke,
    parameter=V4.parameter,
    empty_arguments="\n",
    has_system_token=False,
    joins_empty_texts=False,
    efforts={"minimal": "", "low": "", "medium": "", "high": "", "xhigh": _EFFORT_LONG, "max": _EFFORT_LONG},
    takes_budget=False,
    json_reply=V4.json_reply,
)
V41 = Dialect(
    block=f"{MARK} calls",
    invoke=f"{MARK} invoke",
    parameter=f"{MARK} parameter",
    empty_arguments="\n",
    has_system_token=True,
    joins_empty_texts=True,
    efforts=_budgets(minimal=50, low=50, medium=75, high=75, xhigh=75, max=100),
    takes_budget=True,
    json_reply=RESPONSE_FORMAT + '{"type": "json_object"}',
)
# By the model_type of config.json.
DIALECTS = {"deepseek_v4": V4, "deepseek_v41": V41}


def released_dialect(model_type: object, encoder: str | None) -> Dialect | None:
    """The dialect of a release, or None for a family without one.

    Args:
        model_type: of config.json.
        encoder: text of the encoder file in the release, which tells the early releases of a family from the later
            ones; without the file it is a later one.
    """
    dialect = DIALECTS.get(model_type) if isinstance(model_type, str) else None
    if dialect is V4 and encoder is not None and LONGEST_EFFORT_MARK not in encoder:
        return V4_PREVIEW
    return dialect
