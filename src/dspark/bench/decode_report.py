"""What a decode benchmark measures and what it found: settings, figures, and the report around them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dspark.bench.decode_phases import Phases
from dspark.bench.decode_profile import StepProfile
from dspark.bench.decode_ranks import Collectives
from dspark.engine.memory import MemoryPlan

SCHEMA = "dspark.bench.decode/2"
PLAIN, ROUNDS = "plain", "DSpark"
EXACT, FAST = "exact", "fast"


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured.

    Attributes:
        requests: how many run at once, one figure each.
        contexts: tokens of each prompt, one figure each.
        steps: timed steps of each figure; a third as many run again with stamps.
        accepted_len: forced mean accepted length of a round, the bonus counted; None measures the draft's own.
        with_draft: false decodes plainly only.
        temperature: of all requests.
        profile: also list the kernels of a step.
        eager: capture nothing.
        ranks: devices that share every layer.
        exactness: whose products are used, one figure each; see `Config.exactness`.
        engram_tables: where they lie, see `Config.engram_tables`.
    """

    requests: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (512,)
    steps: int = 48
    accepted_len: float | None = 3.51
    with_draft: bool = True
    temperature: float = 0.0
    profile: bool = False
    eager: bool = False
    ranks: int = 1
    exactness: tuple[str, ...] = (EXACT,)
    engram_tables: Literal["device", "pinned", "mapped"] = "device"

    @property
    def stamped_steps(self) -> int:
        """Steps with stamps inside."""
        return max(self.steps // 3, 2)


@dataclass(frozen=True)
class DecodeFigure:
    """One way of decoding at one number of requests.

    Attributes:
        context: tokens of each prompt. exactness: whose products were used.
        step_ms: median; low_ms and high_ms are the 10th and the 90th of a hundred.
        tokens: emitted tokens of a step, of all requests; a step is a round of each.
        phases: of the steps with stamps.
        experts: distinct experts a layer that the rows of (target, draft) reach; None where none were counted.
        floor_ms: least time of a step by the bytes of evenly routed rows, and counted_floor_ms by the experts that were
            counted; None without an accelerator.
        profile: kernels of a step, where they were asked for; a sentence where the profiler failed.
        collectives: what ranks exchange in a step, where there are several; inside the phases of the passes.
    """

    mode: str
    exactness: str
    context: int
    num_requests: int
    step_ms: float
    low_ms: float
    high_ms: float
    mean_ms: float
    tokens: float
    phases: Phases
    experts: tuple[float | None, float | None]
    floor_ms: float | None
    counted_floor_ms: float | None
    profile: StepProfile | str | None = None
    collectives: Collectives | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, and so of the one device."""
        return 1e3 * self.tokens / self.mean_ms

    @property
    def ms_per_token(self) -> float:
        """Milliseconds between two tokens of a request."""
        return self.mean_ms * self.num_requests / self.tokens

    @property
    def idle_share(self) -> float | None:
        """Share of a step in which no kernel runs: kernels as the profiler saw them, steps as they are without it."""
        if not isinstance(self.profile, StepProfile):
            return None
        return max(1.0 - self.profile.busy_ms / self.mean_ms, 0.0)

    @property
    def label(self) -> str:
        """What is compared, in words."""
        return self.mode if self.exactness == EXACT else f"{self.mode} {self.exactness}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            **asdict(self),
            "idle_share": self.idle_share,
            "idle_share_profiled": self.profile.idle_share if isinstance(self.profile, StepProfile) else None,
            "accepted_len": self.tokens / self.num_requests,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_request": self.tokens_per_second / self.num_requests,
            "ms_per_token": self.ms_per_token,
            "roofline_share": self.floor_ms / self.step_ms if self.floor_ms else None,
        }


@dataclass(frozen=True)
class DecodeReport:
    """All figures of one geometry on one machine. copy_bandwidth: bytes a second, None without an accelerator."""

    geometry: str
    cuts: tuple[str, ...]
    machine: dict[str, Any]
    settings: DecodeSettings
    request_bytes: int
    memory: MemoryPlan
    copy_bandwidth: float | None
    figures: tuple[DecodeFigure, ...]

    def gain(self, figure: DecodeFigure) -> float | None:
        """Tokens a second over those of plain decoding with as many requests as long."""
        plain = self._beside(figure, mode=PLAIN)
        return figure.tokens_per_second / plain.tokens_per_second if plain else None

    def cost_of_exactness(self, figure: DecodeFigure) -> float | None:
        """Share by which an exact step is longer than the same one with the library's products."""
        fast = self._beside(figure, exactness=FAST) if figure.exactness == EXACT else None
        return figure.step_ms / fast.step_ms - 1.0 if fast else None

    def _beside(self, figure: DecodeFigure, **changes: str) -> DecodeFigure | None:
        """The figure that differs from one in some fields only."""
        names = ("mode", "exactness", "context", "num_requests")
        wanted = {name: getattr(figure, name) for name in names} | changes
        return next((f for f in self.figures if all(getattr(f, name) == wanted[name] for name in names)), None)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        values = {key: value for key, value in vars(self).items() if key not in ("settings", "figures")}
        figures = [
            {**f.as_json(), "gain": self.gain(f), "cost_of_exactness": self.cost_of_exactness(f)} for f in self.figures
        ]
        return {
            "schema": SCHEMA,
            "weights": "random",
            **values,
            "memory": self.memory.as_json(),
            "settings": asdict(self.settings),
            "figures": figures,
        }
