"""How drafts are proposed and accepted: SpeculativeConfig, and DSparkConfig for how many of them are verified."""

from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Literal

from dspark.config.checks import require_bool, require_choice, require_int, require_number
from dspark.config.errors import ConfigError

DraftMethod = Literal["dspark", "mtp"]
DRAFT_METHODS: tuple[str, ...] = ("dspark", "mtp")
Schedule = Literal["fixed", "threshold", "throughput"]
SCHEDULES: tuple[str, ...] = ("fixed", "threshold", "throughput")
ACCEPTANCE_METHODS: tuple[str, ...] = ("exact", "relaxed")


@dataclass(frozen=True)
class DSparkConfig:
    """How the confidence head chooses verify lengths.

    Args:
        schedule: "fixed" verifies the whole width, "threshold" cuts each block where survival falls below
            `draft_confidence_threshold`, "throughput" maximises tokens per second with a calibrated profile.
        draft_confidence_threshold: least survival that is still verified, in (0, 1); for "threshold" only.
        calibration_profile: path of the profile that `dspark calibrate` writes.
        allow_untrained_width: run a width above the trained block size although acceptance falls there.
    """

    schedule: Schedule = "fixed"
    draft_confidence_threshold: float | None = None
    calibration_profile: str | None = None
    allow_untrained_width: bool = False

    def __post_init__(self) -> None:
        require_choice("schedule", self.schedule, SCHEDULES)
        require_bool("allow_untrained_width", self.allow_untrained_width)
        if self.draft_confidence_threshold is not None:
            require_number("draft_confidence_threshold", self.draft_confidence_threshold, above=0.0, high=1.0)
        if self.calibration_profile is not None:
            object.__setattr__(self, "calibration_profile", as_path("calibration_profile", self.calibration_profile))

    @property
    def uses_confidence(self) -> bool:
        """True when verify lengths depend on the confidence head."""
        return self.schedule != "fixed"


@dataclass(frozen=True)
class DraftHealthConfig:
    """When an engine stops drafting because it does not pay, and when it tries again. Tokens never depend on it.

    A round here is one request's: 8 requests that run together make 8 rounds in a step.

    Args:
        floor: mean accepted length (bonus counted) below which drafting stops; 1 gains nothing. At least 1.
        recovery: mean accepted length of a trial at which drafting is taken up again, >= floor.
        window: drafted rounds that the mean is taken over.
        probe_after: rounds without drafts before a trial.
        probe_rounds: drafted rounds of a trial.
    """

    floor: float = 1.15
    recovery: float = 1.3
    window: int = 256
    probe_after: int = 2048
    probe_rounds: int = 64

    def __post_init__(self) -> None:
        require_number("draft health floor", self.floor, low=1.0)
        require_number("draft health recovery", self.recovery, low=1.0)
        for name in ("window", "probe_after", "probe_rounds"):
            require_int(f"draft health {name}", getattr(self, name), low=1)
        if self.recovery < self.floor:
            raise ConfigError(
                f"draft health recovery {self.recovery:g} is below the floor {self.floor:g}: drafting would stop and "
                "start again and again; raise it"
            )


@dataclass(frozen=True)
class SpeculativeConfig:
    """The drafter and the acceptance rule. An engine without one of these decodes plainly.

    Args:
        method: which drafter proposes.
        model: folder of the drafter; None or the target's own folder takes the stages that ship with the target.
        num_speculative_tokens: draft tokens per round, G; None takes the trained block size.
        spec_decode_acceptance_length: force the mean accepted length (bonus counted), in [1, G + 1].
        spec_decode_acceptance_rate: the same as a rate in [0, 1]: length = 1 + G * rate.
        acceptance_method: "exact"; "relaxed" is understood and refused.
        dspark_config: verify lengths.
        draft_health: when to stop drafting and when to try again; None drafts whatever it gains, as forced acceptance
            always does.
    """

    method: DraftMethod = "dspark"
    model: str | None = None
    num_speculative_tokens: int | None = None
    spec_decode_acceptance_length: float | None = None
    spec_decode_acceptance_rate: float | None = None
    acceptance_method: str = "exact"
    dspark_config: DSparkConfig = field(default_factory=DSparkConfig)
    draft_health: DraftHealthConfig | None = field(default_factory=DraftHealthConfig)

    def __post_init__(self) -> None:
        require_choice("method", self.method, DRAFT_METHODS)
        require_choice("acceptance_method", self.acceptance_method, ACCEPTANCE_METHODS)
        if self.model is not None:
            object.__setattr__(self, "model", as_path("speculative model", self.model))
        if self.num_speculative_tokens is not None:
            require_int("num_speculative_tokens", self.num_speculative_tokens, low=1)
        if self.spec_decode_acceptance_length is not None:
            require_number("spec_decode_acceptance_length", self.spec_decode_acceptance_length, low=1.0)
        if self.spec_decode_acceptance_rate is not None:
            require_number("spec_decode_acceptance_rate", self.spec_decode_acceptance_rate, low=0.0, high=1.0)
        if not isinstance(self.dspark_config, DSparkConfig):
            raise ConfigError(f"dspark_config must be a DSparkConfig, not {self.dspark_config!r}")
        if self.draft_health is not None and not isinstance(self.draft_health, DraftHealthConfig):
            raise ConfigError(f"draft_health must be a DraftHealthConfig or None, not {self.draft_health!r}")

    @property
    def forces_acceptance(self) -> bool:
        """True when acceptance is simulated; the text is then meaningless."""
        return self.spec_decode_acceptance_length is not None or self.spec_decode_acceptance_rate is not None

    def forced_accepted_len(self, width: int) -> float | None:
        """The forced mean accepted length for `width` draft tokens, bonus counted, or None."""
        if self.spec_decode_acceptance_length is not None:
            return float(self.spec_decode_acceptance_length)
        if self.spec_decode_acceptance_rate is not None:
            return 1.0 + width * float(self.spec_decode_acceptance_rate)
        return None


def as_path(name: str, value: str | PathLike[str]) -> str:
    """A non-empty path as text."""
    try:
        text = fspath(value)
    except TypeError:
        raise ConfigError(f"{name} must be a path, not {value!r}") from None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name} must be a non-empty path, not {value!r}")
    return text
