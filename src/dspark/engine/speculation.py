"""From the configuration to the way an engine speculates, with a reason whenever it does not."""

from dspark.config import Config
from dspark.config.facts import ModelFacts
from dspark.engine.core import Speculation
from dspark.speculative.forced import ForcedAcceptance
from dspark.speculative.lengths import FixedLengths, LengthPolicy, ThresholdLengths

RUNNING = "running"


def plan_speculation(config: Config, facts: ModelFacts) -> tuple[Speculation, str]:
    """The engine's speculation, and "running" or "not running because ..."."""
    settings = config.speculative_config
    if settings is None:
        return Speculation(), "not running because it is switched off"
    if not facts.draft_methods:
        return Speculation(), "not running because the checkpoint has no draft stages"
    width = config.draft_width(facts)
    forced = ForcedAcceptance.from_options(
        width, length=settings.spec_decode_acceptance_length, rate=settings.spec_decode_acceptance_rate
    )
    return Speculation(num_speculative_tokens=width, lengths=_length_policy(config), forced=forced), RUNNING


def _length_policy(config: Config) -> LengthPolicy:
    assert config.speculative_config is not None
    settings = config.speculative_config.dspark_config
    if settings.schedule == "threshold":
        assert settings.draft_confidence_threshold is not None
        return ThresholdLengths(settings.draft_confidence_threshold)
    return FixedLengths()
