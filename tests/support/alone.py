"""What the law compares with: one request decoded alone, one row a pass, without the engine and without speculation.

The token stream of a request depends on prompt and sampling only; where it ends is applied afterwards by `cut`, written
here in the plainest way: decode everything, look for the first stop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.engine.grammar import GrammarCompiler
from dspark.engine.output_matcher import OutputMatcher
from dspark.engine.request import TokenLogprob
from dspark.engine.runner import DraftRunner
from dspark.models.build import Model
from dspark.models.decoder import PassTokens, TargetOutput
from dspark.sampling import RequestSampling, draw, logprobs
from dspark.speculative.dspark import DSparkProposer
from dspark.speculative.proposer import ProposalRequest
from dspark.state.model_state import ModelState, RequestState
from dspark.state.spans import Span, next_span
from dspark.state.views import PassView, keep_context
from support.tiny_models import BLOCK, EOS, NUM_VALID, LetterTokenizer, tiny_model, tiny_state

ENDINGS: dict[str, Any] = {
    "max_tokens": 256,
    "stop": (),
    "stop_token_ids": (),
    "logprobs": None,
    "prompt_logprobs": None,
}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Draft:
    """A block proposed after an anchor: ids [G] and confidence logits [G]."""

    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """All that a user sees of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass
class Stream:
    """Tokens that follow a prompt, rows of logits that drew them, rows of the prompt; drafts by anchor position.

    A free output has no end; a structured one ends where its grammar lets it.
    """

    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    prompt_logits: list[Tensor] = field(default_factory=list)
    drafts: dict[int, Draft] = field(default_factory=dict)

    @property
    def all_ids(self) -> list[int]:
        """Prompt and continuation."""
        return [*self.prompt, *self.token_ids]


def target_pass(model: Model, state: ModelState, rows: Sequence[tuple[RequestState, Sequence[int]]]) -> TargetOutput:
    """One pass over the next rows of some requests.

    Args:
        rows: each request with its whole token ids; those from its committed position on are written.
    """
    spans = [next_span(request, len(tokens) - request.committed) for request, tokens in rows]
    token_ids = [token for span, (_, tokens) in zip(spans, rows, strict=True) for token in tokens[span.start :]]
    ngrams = None
    if model.plan.ngrams is not None:
        reach = range(model.plan.ngrams.max_ngram)
        ngrams = torch.tensor(
            [
                [tokens[place - back] if place >= back else -1 for back in reach]
                for span, (_, tokens) in zip(spans, rows, strict=True)
                for place in range(span.start, span.stop)
            ],
            device=state.device,
        )
    return model.target(PassTokens(torch.tensor(token_ids, device=state.device), ngrams), PassView(state, spans))


def absorb(model: Model, state: ModelState, request: RequestState, target_hidden: Tensor) -> None:
    """Give the draft the features of the rows that were committed last."""
    start = request.committed - target_hidden.shape[0]
    positions = torch.arange(start, request.committed, device=state.device)
    keep_context(state, [Span(request, start, len(positions))], model.draft.context_rows(target_hidden, positions))


@torch.inference_mode()
def decode_stream(model: Model, prompt: Sequence[int], params: SamplingParams, count: int) -> Stream:
    """`count` tokens after a prompt, and the draft block at every anchor.

    Two stores hold nothing but this request, so nobody else's rows can matter.
    """
    state = tiny_state(model, num_slots=1, num_pages=16, garbage=0.0)
    request, stream = state.open(), Stream(tuple(prompt))
    runner = DraftRunner(model, state, BLOCK)
    runner.states["alone"] = request
    proposer = DSparkProposer(runner, BLOCK, NUM_VALID)
    tokens = list(prompt)
    while len(stream.token_ids) < count:
        output = target_pass(model, state, [(request, tokens[: request.committed + 1])])
        state.commit(request, 1)
        absorb(model, state, request, output.target_hidden)
        row = model.target.logits(output.hidden)
        if request.committed < len(tokens):
            stream.prompt_logits.append(row)
            continue
        sampling = RequestSampling(params, len(prompt), tokens)
        mask = allowed_alone(params, stream.token_ids)
        mask = None if mask is None else mask.to(row.device)
        tokens.append(int(draw(row, [sampling.row()], num_valid_tokens=NUM_VALID, mask=mask)))
        stream.token_ids.append(tokens[-1])
        stream.logits.append(row)
        if params.structured is not None and tokens[-1] == EOS:
            break
        constraint = matcher_alone(params, stream.token_ids)
        asked = ProposalRequest("alone", RequestSampling(params, len(prompt), tokens, constraint))
        proposal = proposer.propose([asked])
        stream.drafts[len(tokens) - 1] = Draft(
            tuple(proposal.token_ids[0].tolist()), tuple(proposal.confidence_logits[0].tolist())
        )
    return stream


def matcher_alone(params: SamplingParams, output_ids: Sequence[int]) -> OutputMatcher | None:
    """The engine's constraint, compiled for this call and moved straight to the end of an output."""
    if params.structured is None:
        return None
    matcher = GrammarCompiler(LetterTokenizer(), [EOS], NUM_VALID).start(
        params.structured, avoids_eos=params.ignore_eos
    )
    assert all(matcher.advance(token) for token in output_ids)
    return matcher


def allowed_alone(params: SamplingParams, output_ids: Sequence[int]) -> Tensor | None:
    """What a regular expression allows after an output, asked of the grammar library itself: [1, V] bool or None."""
    if params.structured is None:
        return None
    library = pytest.importorskip("llguidance")
    vocabulary = library.LLTokenizer(LetterTokenizer().definition(), eos_token=[EOS])
    matcher = library.LLMatcher(vocabulary, library.LLMatcher.grammar_from_regex(params.structured.text))
    assert matcher.consume_tokens(list(output_ids))
    bits = matcher.compute_bitmask()
    allowed = [bool(bits[token // 8] >> token % 8 & 1) for token in range(NUM_VALID)]
    if params.ignore_eos and any(allowed[:EOS] + allowed[EOS + 1 :]):
        allowed[EOS] = False
    return torch.tensor([allowed])


def cut(stream: Stream, params: SamplingParams, max_model_len: int) -> Outcome:
    """Where the output ends: read the stream token by token and look at the whole text each time."""
    tokenizer = LetterTokenizer()
    most = min(params.max_tokens, max_model_len - len(stream.prompt))
    for length in range(1, len(stream.token_ids) + 1):
        ids = stream.token_ids[:length]
        ends = ids[-1] == EOS and not (params.ignore_eos and params.structured is None)
        if ids[-1] in params.stop_token_ids or ends:
            return _outcome(stream, params, length, tokenizer.decode(ids[:-1]), "stop")
        text = tokenizer.decode(ids)
        places = [text.find(stop) for stop in params.stop if stop in text and not text.endswith(REPLACEMENT)]
        if places:
            return _outcome(stream, params, length, text[: min(places)], "stop")
        if length == most:
            return _outcome(stream, params, length, text, "length")
    raise AssertionError("the stream is too short for these parameters")


def _outcome(stream: Stream, params: SamplingParams, length: int, text: str, reason: str) -> Outcome:
    tokens = tuple(stream.token_ids[:length])
    found = () if params.logprobs is None else row_by_row(stream.logits[:length], tokens, params.logprobs)
    prompt = None
    if params.prompt_logprobs is not None:
        prompt = (None, *row_by_row(stream.prompt_logits, stream.prompt[1:], params.prompt_logprobs))
    return Outcome(tokens, text, reason, found, prompt)


def row_by_row(rows: Sequence[Tensor], token_ids: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of tokens, each computed from its own row [1, V] alone."""
    found = []
    for row, token in zip(rows, token_ids, strict=True):
        best = logprobs(row, torch.tensor([token], device=row.device), count, num_valid_tokens=NUM_VALID)
        pairs = zip(best.top_ids[0].tolist(), best.top[0].tolist(), strict=True)
        own, others = float(row[0, token]), row[0, :NUM_VALID].tolist()
        rank = 1 + sum(other > own or (other == own and i < token) for i, other in enumerate(others))
        found.append(TokenLogprob(best.token.item(), tuple(pairs), token, int(rank)))
    return tuple(found)


@cache
def _stream(model_key: tuple[Any, ...], prompt: tuple[int, ...], sampling: "Frozen", count: int) -> Stream:
    return decode_stream(tiny_model(*model_key), prompt, sampling.params, count)


@dataclass(frozen=True)
class Frozen:
    """Sampling parameters as a key of a cache."""

    params: SamplingParams

    def __hash__(self) -> int:
        return hash(repr(self.params))


def stream_of(model_key: tuple[Any, ...], prompt: Iterable[int], params: SamplingParams, count: int) -> Stream:
    """The stream of a request; parameters that only end it share one stream."""
    endings = {**ENDINGS, "ignore_eos": params.ignore_eos and params.structured is not None}
    return _stream(model_key, tuple(prompt), Frozen(replace(params, **endings)), count)


def bits_of(values: Mapping[int, Draft] | Sequence[float]) -> object:
    """Something that compares equal only when every bit does; floats become their hexadecimal spelling."""
    if isinstance(values, Mapping):
        return {key: (draft.token_ids, bits_of(draft.confidence)) for key, draft in values.items()}
    return [float(value).hex() for value in values]
