"""The model families that are known, by the `model_type` of config.json."""

from collections.abc import Mapping
from typing import Any

from dspark.config.errors import ConfigError
from dspark.layers.plans import ModelPlan
from dspark.models import deepseek_v4, deepseek_v41
from dspark.models.plan_checks import check_plan

# The family of the model that ships with the project.
EMBEDDED_MODEL_TYPE = deepseek_v41.MODEL_TYPE
EMBEDDED_ARCHITECTURE = deepseek_v41.ARCHITECTURE

_FAMILIES = {module.MODEL_TYPE: module.parse_config for module in (deepseek_v41, deepseek_v4)}


def parse_config(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of a config.json. Raises ConfigError naming what is unknown or missing."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"model_type is {kind!r}; known are {known}: give a checkpoint of one of these families")
    try:
        plan = _FAMILIES[kind](config)
        check_plan(plan)
        return plan
    except KeyError as error:
        raise ConfigError(
            f"config.json of a {kind} model lacks the key {error.args[0]!r}: fetch the file again"
        ) from error
    except (TypeError, AttributeError, ArithmeticError, IndexError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"config.json of a {kind} model has a value of the wrong kind ({error})") from error
