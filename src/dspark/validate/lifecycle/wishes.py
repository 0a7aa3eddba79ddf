"""What is asked of an engine, and what must come back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dspark.config.sampling import SamplingParams
from dspark.engine.request import Emission, TokenLogprob

_DEFAULTS = SamplingParams()


@dataclass(frozen=True)
class Wish:
    """A request as a user makes it: prompt and sampling parameters."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def is_exact(self) -> bool:
        """Whether its tokens are promised; the ratio test promises a distribution only."""
        return self.params.sampler == "keyed"

    @property
    def key(self) -> tuple[tuple[int, ...], str]:
        """Equal for equal requests; parameters may hold mappings, so they are spelt out."""
        return self.prompt_ids, repr(self.params)

    def with_params(self, **changes: Any) -> "Wish":
        """The same prompt with other parameters."""
        return Wish(self.prompt_ids, replace(self.params, **changes))

    def as_json(self) -> dict[str, Any]:
        """Prompt and the parameters that are not the defaults."""
        changed = {
            field.name: _plain(value)
            for field in fields(self.params)
            if (value := getattr(self.params, field.name)) != getattr(_DEFAULTS, field.name)
        }
        return {"prompt_ids": list(self.prompt_ids), "params": changed}


def _plain(value: Any) -> Any:
    """A parameter's value as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return {str(key): _plain(item) for key, item in value.items()} if hasattr(value, "items") else repr(value)


@dataclass(frozen=True)
class Answer:
    """All that a user sees of a request; of one that is still running, what there is so far.

    Attributes:
        prompt_logprobs: entry 0 is None; None as a whole where not asked for.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def after(self, emission: Emission) -> "Answer":
        """This answer with what a step added."""
        return Answer(
            token_ids=self.token_ids + emission.token_ids,
            text=self.text + emission.text,
            finish_reason=emission.finish_reason,
            logprobs=self.logprobs + emission.logprobs,
            prompt_logprobs=self.prompt_logprobs if emission.prompt_logprobs is None else emission.prompt_logprobs,
        )


def collect(emissions: Iterable[Emission]) -> Answer:
    """The answer that emissions add up to."""
    answer = Answer()
    for emission in emissions:
        answer = answer.after(emission)
    return answer


@dataclass(frozen=True)
class Difference:
    """The first thing in which an answer is not the expected one.

    Attributes:
        what: "tokens", "text", "finish_reason", "logprobs" or "prompt_logprobs".
        place: index of the first difference, None where there is no index.
        expected, found: what stands there; None past the end.
    """

    what: str
    place: int | None
    expected: Any
    found: Any

    def __str__(self) -> str:
        where = "" if self.place is None else f" at {self.place}"
        return f"{self.what}{where}: expected {self.expected!r:.120}, found {self.found!r:.120}"


def first_difference(expected: Answer, found: Answer) -> Difference | None:
    """Compare bit for bit; of an unfinished answer the part that is there, prompt logprobs only once it has tokens."""
    is_done = found.finish_reason is not None
    parts: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
        ("tokens", expected.token_ids, found.token_ids),
        ("logprobs", expected.logprobs, found.logprobs),
        ("text", expected.text, found.text),
    )
    for what, wanted, got in parts:
        place = _first_place(wanted, got, is_done)
        if place is not None:
            return Difference(what, place, _at(wanted, place), _at(got, place))
    if is_done and expected.finish_reason != found.finish_reason:
        return Difference("finish_reason", None, expected.finish_reason, found.finish_reason)
    if found.token_ids and expected.prompt_logprobs != found.prompt_logprobs:
        asked, given = expected.prompt_logprobs or (), found.prompt_logprobs or ()
        place = _first_place(asked, given, True) or 0
        return Difference("prompt_logprobs", place, _at(asked, place), _at(given, place))
    return None


def _first_place(expected: Sequence[Any], found: Sequence[Any], is_done: bool) -> int | None:
    for place, (wanted, got) in enumerate(zip(expected, found, strict=False)):
        if wanted != got:
            return place
    if len(found) > len(expected) or (is_done and len(found) < len(expected)):
        return min(len(expected), len(found))
    return None


def _at(sequence: Sequence[Any], place: int) -> Any:
    return sequence[place] if place < len(sequence) else None
