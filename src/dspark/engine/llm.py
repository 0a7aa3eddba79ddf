"""LLM: a checkpoint folder as something that continues text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dspark.config import Config, SamplingParams
from dspark.config.environment import read_environment
from dspark.config.errors import CheckpointError, ConfigError
from dspark.engine.core import Engine
from dspark.engine.identity import engine_identity
from dspark.engine.observer import RoundObserver
from dspark.engine.opening import open_checkpoint
from dspark.engine.prompts import Prompt, as_params, as_prompts, prompt_token_ids
from dspark.engine.request import Emission, Request, TokenLogprob
from dspark.engine.speculation import default_speculation, plan_speculation
from dspark.engine.threads import use_threads_for
from dspark.engine.tokenizer import TextTokenizer, generation_eos_ids
from dspark.layers.plans import ModelPlan
from dspark.models.build import load_model
from dspark.ops.opset import TORCH_OPS
from dspark.scheduler.fifo import FifoScheduler
from dspark.scheduler.plan import RequestId, RequestNeeds
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.state.model_state import ModelState

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Completion:
    """A finished output.

    Attributes:
        token_ids: emitted tokens, the one that ended the output included.
        text: their text, without stop token or stop string.
        finish_reason: "stop" or "length".
        origins: for each token, True for an accepted draft and False for the target's own.
        logprobs: for each token, where asked for.
        statistics: rounds of the request.
        seconds: wall time of the whole call that produced it, shared by the prompts of one call.
        prompt_len: tokens of the prompt.
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


class LLM:
    """A model with its engine.

    Args:
        model: folder of a checkpoint; None is the embedded model.
        config: all settings; `model` and `overrides` replace its fields.
        draft: "dspark" or "off", read only without a `config` and without a speculative_config in `overrides`;
            "dspark" then verifies drafts by `default_speculation`, and decodes plainly where there is no drafter.
        overrides: fields of `Config`.
    Attributes:
        config, plan: as they run.
        device: where they run.
        num_threads: CPU threads of one operation.
        admission: notes and remarks on the configuration.
        speculation_status: "running", or "not running because ...".
        max_model_len: tokens of a request at most.
    Raises:
        ConfigError, CheckpointError: with what to change.
    """

    def __init__(
        self, model: str | Path | None = None, *, config: Config | None = None, draft: str = "dspark", **overrides: Any
    ) -> None:
        is_default = config is None and "speculative_config" not in overrides
        opening = open_checkpoint(_merged_config(model, config, draft, overrides), is_draft_optional=is_default)
        self.config, self.folder, self.admission = opening.config, opening.folder, opening.admission
        self.device = "cpu"
        self.num_threads = use_threads_for(opening.plan, read_environment())
        self.max_model_len = self.config.context_len(opening.facts)
        identity = engine_identity(self.config, opening.plan, self.folder, TORCH_OPS)
        self.speculation, self.speculation_status = plan_speculation(self.config, opening.facts, identity)
        self.tokenizer = _tokenizer_for(opening.plan, self.folder)
        self._model = load_model(
            self.folder,
            TORCH_OPS,
            TORCH_DTYPES["fp32" if self.config.dtype == "auto" else self.config.dtype],
            with_draft=self.config.speculative_config is not None,
            draft_folder=opening.draft_folder,
        )
        eos = dict.fromkeys((*self._model.plan.eos_token_ids, *generation_eos_ids(self.folder)))
        self._model.plan = replace(self._model.plan, eos_token_ids=tuple(eos))
        self.plan = self._model.plan
        self._engine, self._scheduler = self._build()
        self._ids = count()
        self._undelivered: list[Emission] = []

    def _build(self) -> tuple[Engine, FifoScheduler]:
        config, width = self.config, self.speculation.num_speculative_tokens
        page_tokens = ModelState.page_tokens_of(self.plan)
        num_pages = config.max_num_pages or config.max_num_seqs * -(-self.max_model_len // page_tokens)
        # Every value of an index key fits bf16 exactly, so keys are held in it whatever the other rows are.
        state = ModelState(
            self.plan,
            config.max_num_seqs,
            num_pages,
            1 + width,
            TORCH_DTYPES[config.kv_cache_dtype],
            index_dtype=torch.bfloat16,
        )
        scheduler = FifoScheduler(config.max_num_seqs, config.max_num_batched_tokens, num_pages, page_tokens)
        return Engine(self._model, state, self.tokenizer, self.speculation), scheduler

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue every prompt; the results are in the order of the prompts."""
        listed = as_prompts(prompts)
        began = time.perf_counter()
        requests = self._submit(listed, as_params(listed, params))
        texts: dict[RequestId, list[str]] = {request.request_id: [] for request in requests}
        for emission in self._run(requests):
            texts[emission.request_id].append(emission.text)
        seconds = time.perf_counter() - began
        return [_completion(request, "".join(texts[request.request_id]), seconds) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Emission]:
        """Continue one prompt, an emission a step. Closing the iterator aborts the request; others may go on."""
        yield from self._run(self._submit([prompt], as_params([prompt], params)))

    def observe_rounds(self, observer: RoundObserver | None) -> None:
        """Tell an observer of every round from now on; None ends it. The tokens do not depend on it."""
        self._engine.observer = observer

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Request]:
        """Take in all of them or, where one is refused, none."""
        requests: list[Request] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                token_ids = prompt_token_ids(self.tokenizer, prompt)
                request = self._engine.add(next(self._ids), token_ids, own, self.max_model_len)
                requests.append(request)
                self._scheduler.add(RequestNeeds(request.request_id, request.num_pending, 0, request.max_len))
        except BaseException:
            self._discard(requests)
            raise
        return requests

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
                    self._step()
                for emission in own:
                    if emission.finish_reason is not None:
                        running.remove(emission.request_id)
                    yield emission
        finally:
            self._discard(requests)

    def _step(self) -> None:
        """One step of the engine; a request that has ended frees its place at once."""
        for request_id in self._scheduler.admit():
            self._engine.start(request_id)
        for emission in self._engine.step(self._scheduler.plan(self._engine.needs)):
            if emission.finish_reason is not None:
                self._scheduler.finish(emission.request_id)
                self._engine.remove(emission.request_id)
            self._undelivered.append(emission)

    def _discard(self, requests: Sequence[Request]) -> None:
        """Forget requests, whatever has become of them."""
        discarded = {request.request_id for request in requests}
        self._undelivered = [emission for emission in self._undelivered if emission.request_id not in discarded]
        for request_id in discarded & self._engine.requests.keys():
            self._scheduler.finish(request_id)
            self._engine.remove(request_id)


def _tokenizer_for(plan: ModelPlan, folder: Path) -> TextTokenizer:
    """The folder's tokenizer; it may have fewer tokens than the model has rows, and not more."""
    tokenizer = TextTokenizer(folder)
    if tokenizer.vocab_size > plan.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens and the model only {plan.vocab_size} rows: "
            "use the tokenizer.json that ships with this model"
        )
    return tokenizer


def _merged_config(model: str | Path | None, config: Config | None, draft: str, overrides: dict[str, Any]) -> Config:
    if draft not in ("dspark", "off"):
        raise ConfigError(f'draft must be "dspark" or "off", not {draft!r}')
    known = {field.name for field in fields(Config)}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{name!r} is no setting of the engine; known are {', '.join(sorted(known))}")
    if config is None:
        config = Config(speculative_config=default_speculation() if draft == "dspark" else None)
    if model is not None:
        overrides = {"model": str(model), **overrides}
    return replace(config, **overrides)


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
    )
