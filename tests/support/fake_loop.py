"""An engine loop of straw: fixed texts, steps that can be slow or fail, and the counts of a real one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.config import Admission, Config, SamplingParams
from dspark.config.errors import ConfigError
from dspark.engine import Emission, embedded_folder
from dspark.engine.assembly import Assembly
from dspark.engine.core import Speculation
from dspark.engine.device import place
from dspark.engine.request import TokenLogprob
from dspark.engine.status import LoopStatus, PrefixStatistics
from dspark.engine.text import TextStream
from dspark.speculative.statistics import AcceptanceStatistics
from support.fake_engine import BOS, ByteTokenizer, FakePlan

WIDTH = 5
EOS = 257
NUM_PAGES = 1000
PAGE_TOKENS = 16


class FakeTokenizer(ByteTokenizer):
    """Bytes are tokens; two special ones follow."""

    vocab_size = 258
    special_ids = frozenset({BOS, EOS})

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode([token for token in token_ids if token < BOS])

    def least_tokens(self, text: str) -> int:
        return len(text)

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id) or bytes([token_id])


@dataclass
class FakeRequest:
    """One request: what it will say, and how far it has come."""

    prompt_ids: list[int]
    params: SamplingParams
    reply: list[int]
    text: TextStream
    emitted: int = 0
    statistics: AcceptanceStatistics = field(default_factory=lambda: AcceptanceStatistics(WIDTH))


@dataclass(frozen=True)
class FakeScheduler:
    """The capacity of the pages."""

    num_pages: int = NUM_PAGES
    page_tokens: int = PAGE_TOKENS


class FakeGrammars:
    """Takes every form."""

    def start(self, form: object) -> None:
        """Nothing is compiled."""


@dataclass
class FakeCore:
    """Whether drafts are proposed; a test may change it while the loop runs."""

    speculation_status: str = "running"
    grammars: FakeGrammars = field(default_factory=FakeGrammars)


@dataclass
class FakeLoop:
    """Emits one token of every running request in its first step, then `accepted` drafts and a bonus in each.

    A request says `reply_to(prompt_ids, seed)`. `before_step` is called with the number of the step, and may wait or
    raise.
    """

    reply_to: Callable[[list[int], int], str] = lambda prompt_ids, seed: "the quick brown fox"
    accepted: int = 3
    max_num_seqs: int = 4
    max_model_len: int = 2048
    before_step: Callable[[int], None] = lambda step: None
    num_cached_tokens: int = 0
    requests: dict[Any, FakeRequest] = field(default_factory=dict)
    submitted: list[tuple[Any, list[int], SamplingParams]] = field(default_factory=list)
    aborted: list[Any] = field(default_factory=list)
    num_steps: int = 0
    engine: FakeCore = field(default_factory=FakeCore)
    scheduler: FakeScheduler = field(default_factory=FakeScheduler)
    acceptance: AcceptanceStatistics = field(default_factory=lambda: AcceptanceStatistics(WIDTH))

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_samples(
        self,
        request_ids: Sequence[Any],
        prompt_ids: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
    ) -> None:
        if not prompt_ids:
            raise ConfigError("the prompt is empty: give at least one token")
        if len(prompt_ids) >= self.max_model_len:
            raise ConfigError(f"the prompt has {len(prompt_ids)} tokens and the context holds {self.max_model_len}")
        for request_id, own in zip(request_ids, params, strict=True):
            reply = list(self.reply_to(list(prompt_ids), own.seed).encode())[: own.max_tokens]
            stream = TextStream(FakeTokenizer().decode, own.stop)
            self.requests[request_id] = FakeRequest(list(prompt_ids), own, reply, stream)
            self.submitted.append((request_id, list(prompt_ids), own))

    def abort(self, request_id: Any) -> bool:
        self.aborted.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def step(self) -> list[Emission]:
        self.num_steps += 1
        self.before_step(self.num_steps)
        running = list(self.requests.items())[: self.max_num_seqs]
        return [self._emit(request_id, request) for request_id, request in running]

    def status(self) -> LoopStatus:
        running = list(self.requests.values())[: self.max_num_seqs]
        used = sum(-(-len(request.prompt_ids) // PAGE_TOKENS) for request in running)
        return LoopStatus(
            num_running=len(running),
            num_waiting=len(self.requests) - len(running),
            num_pages=NUM_PAGES,
            num_free_pages=NUM_PAGES - used,
            num_cached_pages=0,
            num_steps=self.num_steps,
            num_preemptions=0,
            last_step_rows=0,
            last_verify_rows=0,
            prefix=PrefixStatistics(0, 0, 0, 0, 0, 0, 0),
            speculation=self.engine.speculation_status,
            acceptance=AcceptanceStatistics.from_dict(self.acceptance.to_dict()),
        )

    def _emit(self, request_id: Any, request: FakeRequest) -> Emission:
        size = self.accepted + 1 if request.emitted else 1
        chunk: list[int] = []
        reason = None
        for token in request.reply[request.emitted : request.emitted + size]:
            chunk.append(token)
            if request.text.push(token):
                reason = "stop"
                break
        is_round = bool(request.emitted)
        request.emitted += len(chunk)
        if reason is None and request.emitted == len(request.reply):
            reason = "length"
        if is_round and chunk:
            for statistics in (request.statistics, self.acceptance):
                statistics.record(WIDTH if self.accepted else 0, len(chunk) - 1, num_emitted=len(chunk))
        if reason:
            del self.requests[request_id]
        return self._emission(request_id, request, chunk, reason, is_first=not is_round)

    def _emission(
        self, request_id: Any, request: FakeRequest, chunk: list[int], reason: str | None, is_first: bool
    ) -> Emission:
        params = request.params
        prompt_logprobs = None
        if params.prompt_logprobs is not None and is_first:
            prompt_logprobs = (None, *(logprob(token, params.prompt_logprobs) for token in request.prompt_ids[1:]))
        return Emission(
            request_id,
            tuple(chunk),
            len(chunk) - 1,
            request.text.take(is_final=reason is not None),
            reason,
            request.statistics,
            logprobs=() if params.logprobs is None else tuple(logprob(token, params.logprobs) for token in chunk),
            origins=(*([True] * (len(chunk) - 1)), False) if chunk else (),
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            verify_len=0 if is_first else WIDTH,
            prompt_len=len(request.prompt_ids),
        )


def logprob(token: int, count: int) -> TokenLogprob:
    """A value that names its token, which is the most likely one."""
    top = tuple((token + k, -token / 1000 - k) for k in range(count))
    return TokenLogprob(token=-token / 1000, top=top, token_id=token, rank=1)


def sleeping(seconds: float) -> Callable[[int], None]:
    """Steps that take a while."""
    return lambda step: time.sleep(seconds)


def failing_at(number: int) -> Callable[[int], None]:
    """A step that fails."""

    def check(step: int) -> None:
        if step >= number:
            raise RuntimeError("the device is gone")

    return check


def fake_assembly(loop: FakeLoop | None = None, **config: Any) -> Assembly:
    """An assembly around a fake loop."""
    loop = loop or FakeLoop()
    return Assembly(
        loop=loop,
        config=Config(max_num_seqs=loop.max_num_seqs, **config),
        plan=FakePlan(),
        folder=embedded_folder(),
        draft_folder=None,
        tokenizer=FakeTokenizer(),
        admission=Admission(),
        speculation=Speculation(),
        max_model_len=loop.max_model_len,
        placement=place(Config(device="cpu")),
        num_threads=1,
    )
