"""Speculative settings as JSON, with the keys that other servers of the field use beside our own."""

import json
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from dspark.config.errors import ConfigError
from dspark.config.speculative import DraftHealthConfig, DSparkConfig, SpeculativeConfig

_OWN = {field.name for field in fields(SpeculativeConfig)}
_OTHERS = {
    "draft_tensor_parallel_size",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "enable_adaptive_verification",
    "draft_sample_method",
}


def read_speculative_json(
    text: str, *, adaptive: SpeculativeConfig, tensor_parallel_size: int = 1
) -> SpeculativeConfig:
    """Settings from a JSON object.

    Args:
        text: the object.
        adaptive: how drafts are verified unless the object says it.
        tensor_parallel_size: of the target, which the draft shares.
    Raises:
        ConfigError: it is no object, or a key is unknown or asks for what is not offered; the message names it.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError('speculative_config must be a JSON object, such as {"num_speculative_tokens": 5}')
    _require_known(given, _OWN | _OTHERS, "speculative_config")
    settings = {name: value for name, value in given.items() if name in _OWN}
    settings["dspark_config"] = _verify_lengths(given, adaptive)
    if isinstance(health := given.get("draft_health"), dict):
        _require_known(health, {field.name for field in fields(DraftHealthConfig)}, "draft_health")
        settings["draft_health"] = DraftHealthConfig(**health)
    _require_shared_ranks(given.get("draft_tensor_parallel_size"), tensor_parallel_size)
    if given.get("draft_sample_method") not in (None, "probabilistic"):
        raise ConfigError(
            f"draft_sample_method {given['draft_sample_method']!r} is not offered: drafts are drawn with the noise of "
            'their positions, leave it out or use "probabilistic"'
        )
    length = _forced_length(given)
    if length is not None:
        settings["spec_decode_acceptance_length"] = length
        settings["dspark_config"] = DSparkConfig()
    return SpeculativeConfig(**settings)


def _require_known(given: Mapping[str, Any], known: set[str], place: str) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{place} holds the unknown key {name!r}; {hint}")


def _verify_lengths(given: Mapping[str, Any], adaptive: SpeculativeConfig) -> DSparkConfig:
    own, is_adaptive = given.get("dspark_config"), given.get("enable_adaptive_verification")
    if is_adaptive not in (None, True, False):
        raise ConfigError(f"enable_adaptive_verification must be true or false, not {is_adaptive!r}")
    if own is None:
        return DSparkConfig() if is_adaptive is False else adaptive.dspark_config
    if is_adaptive is not None:
        raise ConfigError("dspark_config and enable_adaptive_verification both choose verify lengths: give one of them")
    if not isinstance(own, dict):
        raise ConfigError(f"dspark_config must be a JSON object, not {own!r}")
    _require_known(own, {field.name for field in fields(DSparkConfig)}, "dspark_config")
    return DSparkConfig(**own)


def _require_shared_ranks(given: Any, tensor_parallel_size: int) -> None:
    if given is not None and given != tensor_parallel_size:
        raise ConfigError(
            f"draft_tensor_parallel_size is {given!r}: the draft runs on the target's {tensor_parallel_size} ranks, "
            "leave it out"
        )


def _forced_length(given: Mapping[str, Any]) -> Any | None:
    """The forced accepted length of the method "synthetic"."""
    method, length = given.get("rejection_sample_method", "standard"), given.get("synthetic_acceptance_length")
    if given.get("synthetic_acceptance_rates") is not None:
        raise ConfigError(
            "synthetic_acceptance_rates is not offered: give the mean they stand for as synthetic_acceptance_length"
        )
    if method == "synthetic":
        if length is None:
            raise ConfigError('rejection_sample_method "synthetic" needs synthetic_acceptance_length')
        return length
    if length is not None:
        raise ConfigError('synthetic_acceptance_length belongs to rejection_sample_method "synthetic"')
    if method != "standard":
        raise ConfigError(f'rejection_sample_method {method!r} is not offered: use "standard", which is exact')
    return None
