"""LLM: a checkpoint folder as something that continues text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dspark.config import Config, SamplingParams
from dspark.engine.assembly import assemble
from dspark.engine.observer import RoundObserver
from dspark.engine.prompts import Prompt, as_params, as_prompts, prompt_token_ids
from dspark.engine.request import Emission, Request, TokenLogprob
from dspark.engine.status import LoopStatus
from dspark.scheduler.plan import RequestId
from dspark.speculative.statistics import AcceptanceStatistics


@dataclass(frozen=True)
class Completion:
    """A finished output.

    Attributes:
        token_ids: emitted tokens, the one that ended the output included.
        text: their text, without stop token or stop string.
        finish_reason: "stop" or "length".
        origins: for each token, True for an accepted draft and False for the target's own.
        logprobs: for each token, where asked for.
        prompt_logprobs: for each prompt token, None for the first; None where nobody asked.
        statistics: rounds of the request.
        seconds: wall time of the whole call that produced it, shared by the prompts of one call.
        prompt_len: tokens of the prompt.
        num_cached_tokens: how many of them came from the prefix cache.
        request_id: under which an observer was told of its rounds.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    origins: list[bool]
    logprobs: list[TokenLogprob]
    statistics: AcceptanceStatistics
    seconds: float
    prompt_len: int
    request_id: RequestId
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None


class LLM:
    """A model with its engine.

    Args:
        model, config, draft, overrides: see `assemble`.
    Attributes:
        config, plan: as they run.
        device: where they run.
        num_threads: CPU threads of one operation.
        admission: notes and remarks on the configuration.
        max_model_len: tokens of a request at most.
    Raises:
        ConfigError, CheckpointError: with what to change.
    """

    def __init__(
        self, model: str | Path | None = None, *, config: Config | None = None, draft: str = "dspark", **overrides: Any
    ) -> None:
        assembly = assemble(model, config=config, draft=draft, **overrides)
        self.config, self.plan, self.folder = assembly.config, assembly.plan, assembly.folder
        self.admission, self.speculation = assembly.admission, assembly.speculation
        self.device, self.num_threads = assembly.device, assembly.num_threads
        self.tokenizer, self.max_model_len = assembly.tokenizer, assembly.max_model_len
        self.loop = assembly.loop
        self._ids = count()
        self._undelivered: list[Emission] = []

    @property
    def speculation_status(self) -> str:
        """ "running", or "not running because ..."; it may change from call to call."""
        return self.loop.engine.speculation_status

    def status(self) -> LoopStatus:
        """What the engine holds and has done so far."""
        return self.loop.status()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue every prompt; the results are in the order of the prompts."""
        listed = as_prompts(prompts)
        began = time.perf_counter()
        return self._complete(self._submit(listed, as_params(listed, params)), began)

    def sample(self, prompt: Prompt, params: SamplingParams | None = None, *, n: int) -> list[Completion]:
        """`n` samples of one prompt, which is computed once; `SamplingParams.sample` gives the seed of each."""
        began = time.perf_counter()
        token_ids = prompt_token_ids(self.tokenizer, prompt)
        own = [(params or SamplingParams()).sample(number) for number in range(n)]
        return self._complete(self.loop.add_samples([next(self._ids) for _ in own], token_ids, own), began)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Emission]:
        """Continue one prompt, an emission a step. Closing the iterator aborts the request; others may go on.

        What can never run is refused by this call; nothing is held before the first emission is asked for.
        """
        own = as_params([prompt], params)
        self._discard(self._submit([prompt], own))
        return self._stream(prompt, own)

    def _stream(self, prompt: Prompt, params: list[SamplingParams]) -> Iterator[Emission]:
        yield from self._run(self._submit([prompt], params))

    def observe_rounds(self, observer: RoundObserver | None) -> None:
        """Tell an observer of every round from now on; None ends it. The tokens do not depend on it."""
        self.loop.engine.observer = observer

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Request]:
        """Take in all of them or, where one is refused, none."""
        requests: list[Request] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                token_ids = prompt_token_ids(self.tokenizer, prompt)
                requests.append(self.loop.add(next(self._ids), token_ids, own))
        except BaseException:
            self._discard(requests)
            raise
        return requests

    def _complete(self, requests: Sequence[Request], began: float) -> list[Completion]:
        """Run requests to their ends."""
        texts: dict[RequestId, list[str]] = {request.request_id: [] for request in requests}
        for emission in self._run(requests):
            texts[emission.request_id].append(emission.text)
        seconds = time.perf_counter() - began
        return [_completion(request, "".join(texts[request.request_id]), seconds) for request in requests]

    def _run(self, requests: Sequence[Request]) -> Iterator[Emission]:
        """Emissions of the given requests until all have ended; they are removed however this ends.

        A step serves every running request, so it may emit for other callers too: theirs wait until they ask.
        """
        running = {request.request_id for request in requests}
        try:
            while running:
                own = [emission for emission in self._undelivered if emission.request_id in running]
                self._undelivered = [emission for emission in self._undelivered if emission.request_id not in running]
                if not own:
                    self._undelivered += self.loop.step()
                for emission in own:
                    if emission.finish_reason is not None:
                        running.remove(emission.request_id)
                    yield emission
        finally:
            self._discard(requests)

    def _discard(self, requests: Sequence[Request]) -> None:
        """Forget requests, whatever has become of them."""
        discarded = {request.request_id for request in requests}
        self._undelivered = [emission for emission in self._undelivered if emission.request_id not in discarded]
        for request_id in discarded:
            self.loop.abort(request_id)


def _completion(request: Request, text: str, seconds: float) -> Completion:
    return Completion(
        token_ids=request.output_ids,
        text=text,
        finish_reason=request.finish_reason or "",
        origins=request.origins,
        logprobs=request.logprobs,
        statistics=request.statistics,
        seconds=seconds,
        prompt_len=request.prompt_len,
        request_id=request.request_id,
        num_cached_tokens=request.num_cached_tokens,
        prompt_logprobs=request.prompt_logprobs,
    )
