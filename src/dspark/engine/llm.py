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

Prompt = str | Sequence[int]
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

    def observe_rounds(self, observer: RoundObserver | None) -> None:
        """Tell an observer of every round from now on; None ends it. The tokens do not depend on it."""
        self._engine.observer = observer

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
        request_id=request.request_id,
    )
