"""What the server uses of an engine, or of several that answer as one."""

from collections.abc import Sequence
from typing import Protocol

from dspark.config.sampling import SamplingParams
from dspark.engine.assembly import Outline
from dspark.engine.async_engine import EngineStatus
from dspark.engine.prompts import Prompt
from dspark.engine.sample_stream import SampleStream
from dspark.engine.tokenizer import TextTokenizer


class ServedEngine(Protocol):
    """An `AsyncEngine`, or a fleet of replicas; see there."""

    tokenizer: TextTokenizer
    max_model_len: int

    @property
    def assembly(self) -> Outline:
        """What is known of the engine, weights and loop aside."""
        ...

    @property
    def capacity(self) -> int | None:
        """Requests that may be here at once; None without a limit."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens that one request can ever hold."""
        ...

    async def start(self) -> None:
        """Begin to take requests."""
        ...

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Sequence[SamplingParams]],
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> SampleStream:
        """Hand in several prompts, each with the parameters of its samples; all are taken, or none is."""
        ...

    def status(self) -> EngineStatus:
        """Numbers of a moment ago, and the state now; waits for nothing."""
        ...

    async def refresh(self, timeout_s: float = 0.5) -> EngineStatus:
        """The same with numbers of this moment, where they can be had in time."""
        ...

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for those that are here; True when all came to their own end."""
        ...

    async def shutdown(self) -> None:
        """End everything; may be called again."""
        ...
