"""An engine that emits a given text in given steps, for tests of what stands above the engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dspark.config import Admission, Config
from dspark.engine import Emission
from dspark.speculative.statistics import AcceptanceStatistics

WIDTH = 5
BOS = 256


class ByteTokenizer:
    """Every UTF-8 byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


@dataclass
class FakeCompletion:
    token_ids: list[int]
    statistics: AcceptanceStatistics
    request_id: int = 0


@dataclass(frozen=True)
class FakePlan:
    """The one fact of a model's plan that is read above the engine."""

    bos_token_id: int = BOS


@dataclass
class FakeLLM:
    """Emits the bytes of `text`: first one token, then `accepted` drafts and a bonus in every round.

    `before_emission` is called with the number of tokens emitted so far, and may raise.
    """

    text: str = "the quick brown fox"
    accepted: int = 3
    speculation_status: str = "running"
    before_emission: Callable[[int], None] = lambda emitted: None
    prompts: list[object] = field(default_factory=list)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    plan: FakePlan = field(default_factory=FakePlan)
    config: Config = field(default_factory=Config)
    device: str = "cpu"
    admission: Admission = field(default_factory=Admission)

    def stream(self, prompt: object, params: object) -> Iterator[Emission]:
        self.prompts.append(prompt)
        tokens = self.tokenizer.encode(self.text)[: params.max_tokens]
        statistics = AcceptanceStatistics(WIDTH)
        emitted, printed = 0, 0
        while emitted < len(tokens):
            self.before_emission(emitted)
            chunk = tokens[emitted : emitted + (self.accepted + 1 if emitted else 1)]
            if emitted:
                statistics.record(WIDTH if self.accepted else 0, len(chunk) - 1)
            emitted += len(chunk)
            complete = self.tokenizer.decode(tokens[:emitted]).rstrip("\ufffd")
            text, printed = complete[printed:], len(complete)
            reason = "length" if emitted == len(tokens) else None
            yield Emission("request", tuple(chunk), len(chunk) - 1, text, reason, statistics)

    def generate(self, prompts: list[list[int]], params: object) -> list[FakeCompletion]:
        completions = []
        for prompt in prompts:
            emissions = list(self.stream(prompt, params))
            token_ids = [token for emission in emissions for token in emission.token_ids]
            completions.append(FakeCompletion(token_ids, emissions[-1].statistics))
        return completions
