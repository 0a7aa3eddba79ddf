"""From the configuration to the way an engine speculates, with a reason whenever it does not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.config import Config, DraftHealthConfig, DSparkConfig, SpeculativeConfig
from dspark.config.facts import ModelFacts
from dspark.speculative.forced import ForcedAcceptance
from dspark.speculative.lengths import FixedLengths, LengthPolicy, ThresholdLengths, ThroughputLengths
from dspark.speculative.profile import CalibrationProfile, load_profile
from dspark.speculative.proposer import Proposer

# A row costs about a tenth of a plain step of the embedded model on a CPU: a draft that survives less often does not
# pay for its row (`dspark bench generate`). Which rows are sent never changes the tokens.
DEFAULT_THRESHOLD = 0.1

RUNNING = "running"


@dataclass(frozen=True)
class Speculation:
    """How an engine speculates.

    Attributes:
        num_speculative_tokens: drafts of a round at most, 0 for plain decoding.
        proposer: None takes the checkpoint's own draft.
        lengths: chooses how many drafts are verified.
        temperatures: calibrated confidence temperatures, or None.
        forced: simulated acceptance; the text is then meaningless.
        health: when to stop drafting and when to try again; None drafts whatever it gains.
        inactive_because: why there are no drafts, where there are none.
    """

    num_speculative_tokens: int = 0
    proposer: Proposer | None = None
    lengths: LengthPolicy = field(default_factory=FixedLengths)
    temperatures: tuple[float, ...] | None = None
    forced: ForcedAcceptance | None = None
    health: DraftHealthConfig | None = None
    inactive_because: str = "it is switched off"


def plan_speculation(config: Config, facts: ModelFacts, identity: Mapping[str, Any]) -> Speculation:
    """How the engine speculates, with the reason where it does not.

    Args:
        config: an admitted configuration.
        facts: the target.
        identity: what a calibration profile must agree with, see `dspark.speculative.profile`.
    Raises:
        ConfigError: the calibration profile does not fit this engine.
    """
    settings = config.speculative_config
    if settings is None and not facts.draft_methods:
        return Speculation(inactive_because=f"{facts.name} carries no draft stages")
    if settings is None:
        return Speculation()
    width = config.draft_width(facts)
    forced = ForcedAcceptance.from_options(
        width, length=settings.spec_decode_acceptance_length, rate=settings.spec_decode_acceptance_rate
    )
    dspark, profile = settings.dspark_config, None
    if dspark.calibration_profile is not None:
        path = Path(dspark.calibration_profile)
        profile = load_profile(path, identity=identity, width=width, batch_size=config.max_num_seqs)
    return Speculation(
        num_speculative_tokens=width,
        lengths=_length_policy(dspark, profile, config.max_num_batched_tokens),
        temperatures=profile.temperatures if profile else None,
        forced=forced,
        # Forced acceptance measures the speed of drafting, whatever the drafts are worth.
        health=None if forced else settings.draft_health,
    )


def default_speculation() -> SpeculativeConfig:
    """How an engine speculates that was only asked to: drafts are verified while their survival is worth a row."""
    return SpeculativeConfig(
        dspark_config=DSparkConfig(schedule="threshold", draft_confidence_threshold=DEFAULT_THRESHOLD)
    )


def _length_policy(settings: DSparkConfig, profile: CalibrationProfile | None, max_rows: int) -> LengthPolicy:
    match settings.schedule:
        case "fixed":
            return FixedLengths()
        case "threshold":
            assert settings.draft_confidence_threshold is not None  # admission requires one
            return ThresholdLengths(settings.draft_confidence_threshold)
        case "throughput":
            assert profile is not None  # admission requires one
            return ThroughputLengths(profile.steps_per_second, max_rows=max_rows)
