"""LLM: a checkpoint folder as something that continues text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint.folder import release_fingerprint
from dspark.config import Config, SamplingParams, SpeculativeConfig
from dspark.config.errors import ConfigError
from dspark.engine.core import Engine
from dspark.engine.request import Emission, Request, TokenLogprob
from dspark.engine.speculation import plan_speculation
from dspark.engine.tokenizer import TextTokenizer, generation_eos_ids
from dspark.models.build import load_model
from dspark.models.facts import model_facts
from dspark.scheduler.fifo import FifoScheduler
from dspark.scheduler.plan import RequestId, RequestNeeds
from dspark.speculative.statistics import AcceptanceStatistics
from dspark.state.model_state import ModelState

Prompt = str | Sequence[int]


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
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    origins: list[bool]
    logprobs: list[TokenLogprob]
    statistics: AcceptanceStatistics
    seconds: float
    prompt_len: int


class LLM:
    """A model with its engine.

    Args:
        model: folder of a checkpoint; None is the embedded model.
        config: all settings; `model` and `overrides` replace its fields.
        draft: "dspark" or "off"; ignored where `config` or `overrides` give a speculative_config.
        overrides: fields of `Config`.
    Raises:
        ConfigError, CheckpointError: with what to change.
    """

    def __init__(
        self, model: str | Path | None = None, *, config: Config | None = None, draft: str = "dspark", **overrides: Any
    ) -> None:
        self.config = _merged_config(model, config, draft, overrides)
        self.folder = Path(self.config.model) if self.config.model else embedded_folder()
        self.tokenizer = TextTokenizer(self.folder)
        dtype = torch.bfloat16 if self.config.dtype == "bf16" else torch.float32
        self._model = load_model(self.folder, dtype=dtype, with_draft=self.config.speculative_config is not None)
        eos = dict.fromkeys((*self._model.plan.eos_token_ids, *generation_eos_ids(self.folder)))
        self._model.plan = replace(self._model.plan, eos_token_ids=tuple(eos))
        self.plan = self._model.plan
        facts = model_facts(self.plan, fingerprint=release_fingerprint(self.folder))
        self.speculation, self.speculation_status = plan_speculation(self.config, facts)
        self.admission = self.config.validated(facts)
        self.max_model_len = self.config.context_len(facts)
        self._engine, self._scheduler = self._build()
        self._ids = count()

    def _build(self) -> tuple[Engine, FifoScheduler]:
        config, width = self.config, self.speculation.num_speculative_tokens
        page_tokens = ModelState.page_tokens_of(self.plan)
        num_pages = config.max_num_pages or config.max_num_seqs * -(-self.max_model_len // page_tokens)
        state = ModelState(self.plan, config.max_num_seqs, num_pages, 1 + width, self._model.target.dtype)
        scheduler = FifoScheduler(config.max_num_seqs, config.max_num_batched_tokens, num_pages, page_tokens)
        return Engine(self._model, state, self.tokenizer, self.speculation), scheduler

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue every prompt; the results are in the order of the prompts."""
        listed = _as_list(prompts)
        all_params = _params_for(listed, params)
        began = time.perf_counter()
        finished: dict[RequestId, Request] = {}
        ids = [self._submit(prompt, own) for prompt, own in zip(listed, all_params, strict=True)]
        texts: dict[RequestId, list[str]] = {request_id: [] for request_id in ids}
        for emission in self._run(ids, finished):
            texts[emission.request_id].append(emission.text)
        seconds = time.perf_counter() - began
        return [_completion(finished[request_id], "".join(texts[request_id]), seconds) for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Emission]:
        """Continue one prompt, an emission a step. Closing the iterator aborts the request."""
        yield from self._run([self._submit(prompt, params or SamplingParams())], {})

    def _submit(self, prompt: Prompt, params: SamplingParams) -> RequestId:
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request_id = next(self._ids)
        request = self._engine.add(request_id, prompt_ids, params, self.max_model_len)
        try:
            self._scheduler.add(RequestNeeds(request_id, request.num_pending, 0, request.max_len))
        except ConfigError:
            self._engine.remove(request_id)
            raise
        return request_id

    def _run(self, request_ids: Sequence[RequestId], finished: dict[RequestId, Request]) -> Iterator[Emission]:
        """Step until all given requests have ended; they are removed however this ends."""
        try:
            while any(request_id in self._engine.requests for request_id in request_ids):
                for request_id in self._scheduler.admit():
                    self._engine.start(request_id)
                for emission in self._engine.step(self._scheduler.plan(self._engine.needs)):
                    if emission.finish_reason is not None:
                        self._scheduler.finish(emission.request_id)
                        finished[emission.request_id] = self._engine.remove(emission.request_id)
                    yield emission
        finally:
            for request_id in request_ids:
                if request_id in self._engine.requests:
                    self._scheduler.finish(request_id)
                    self._engine.remove(request_id)


def embedded_folder() -> Path:
    """Folder of the model that ships with the package."""
    return Path(str(files("dspark"))) / "assets" / "embedded"


def _merged_config(model: str | Path | None, config: Config | None, draft: str, overrides: dict[str, Any]) -> Config:
    if draft not in ("dspark", "off"):
        raise ConfigError(f'draft must be "dspark" or "off", not {draft!r}')
    known = {field.name for field in fields(Config)}
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{name!r} is no setting of the engine; known are {', '.join(sorted(known))}")
    if config is None:
        config = Config(speculative_config=SpeculativeConfig() if draft == "dspark" else None)
    if model is not None:
        overrides = {"model": str(model), **overrides}
    return replace(config, **overrides)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) or several, as a list of prompts."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters: give one each")
    return list(params)


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
    )
