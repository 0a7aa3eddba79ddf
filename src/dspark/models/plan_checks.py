"""Kinds and ranges of a plan's values: a config.json with a wrong one is refused before anything is built from it."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from types import NoneType
from typing import Any, get_args, get_type_hints

from dspark.config.errors import ConfigError
from dspark.layers.plans import ModelPlan

# Integers that count or measure something that every model has; all others may be 0.
_POSITIVE = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "max_positions",
        "num_heads",
        "head_dim",
        "q_rank",
        "o_rank",
        "o_groups",
        "window",
        "inner_size",
        "num_experts",
        "topk",
        "num_streams",
        "ratio",
        "block_size",
        "markov_rank",
        "compressed_vocab_size",
    }
)
# Numbers that are switched off by 0; all others divide or scale.
_MAY_BE_ZERO = frozenset({"sum_eps", "limit"})
_WORDS: dict[type, str] = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}


def check_plan(plan: ModelPlan) -> None:
    """Refuse values of the wrong kind, negative integers, sizes and tolerances of zero, and unknown special tokens.

    Raises:
        ConfigError: names the first of them and where in the plan it stands.
    """
    if not plan.layers:
        raise ConfigError(f"config.json of a {plan.family} model has no layers: fetch the file again")
    for fault in chain(_faults("", plan), _id_faults(plan)):
        raise ConfigError(f"config.json of a {plan.family} model is wrong: {fault}; fetch the file again")


def _id_faults(plan: ModelPlan) -> Iterator[str]:
    """Special tokens that the vocabulary does not have."""
    ids = {"bos_token_id": (plan.bos_token_id,), "eos_token_id": plan.eos_token_ids}
    if plan.draft is not None:
        ids["dspark_noise_token_id"] = (plan.draft.noise_token_id,)
    for name, values in ids.items():
        for value in values:
            if value >= plan.vocab_size:
                yield f"{name} is {value}, and vocab_size is {plan.vocab_size}"


def _faults(place: str, plan: Any) -> Iterator[str]:
    hints = get_type_hints(type(plan))
    for field in fields(plan):
        value = getattr(plan, field.name)
        yield from _value_faults(f"{place}{field.name}", field.name, value, hints[field.name])


def _value_faults(place: str, name: str, value: Any, hint: Any) -> Iterator[str]:
    if is_dataclass(value):
        yield from _faults(f"{place}.", value)
    elif isinstance(value, tuple):
        item = get_args(hint)[0]
        for number, part in enumerate(value):
            yield from _value_faults(f"{place}[{number}]", name, part, item)
    else:
        kinds = [kind for kind in (get_args(hint) or (hint,)) if kind in _WORDS]
        may_be_none = NoneType in get_args(hint)
        if kinds and not (value is None and may_be_none):
            yield from _scalar_faults(place, name, value, kinds[0])


def _scalar_faults(place: str, name: str, value: Any, kind: type) -> Iterator[str]:
    if not _is_kind(value, kind):
        yield f"{place} is {value!r}, not {_WORDS[kind]}"
    elif kind is int and value < (1 if name in _POSITIVE else 0):
        yield f"{place} is {value!r}, below {1 if name in _POSITIVE else 0}"
    elif kind is float and value <= 0 and name not in _MAY_BE_ZERO:
        yield f"{place} is {value!r}, not above 0"


def _is_kind(value: Any, kind: type) -> bool:
    """Whether a value is of a kind; true and false are no numbers."""
    if kind is bool or kind is str:
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    if kind is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and math.isfinite(value)
