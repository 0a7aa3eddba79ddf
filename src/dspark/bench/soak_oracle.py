"""The judge of a soak run's answers: the same request decoded alone, plainly, without cache or company."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.bench.generate import first_difference
from dspark.bench.soak_client import Outcome
from dspark.config import SamplingParams
from dspark.config.sampling import sample_seed
from dspark.config.structured import StructuredOutput
from dspark.engine import LLM

_PLAIN_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("max_tokens", "ignore_eos"),
)


@dataclass(frozen=True)
class Verdict:
    """One answer against the oracle.

    Attributes:
        number, kind: of the act.
        num_tokens: compared.
        difference: "" when all samples agree, else where the first does not.
    """

    number: int
    kind: str
    num_tokens: int
    difference: str


class Reservoir:
    """A fair choice of answers of each kind, out of as many as come.

    Args:
        per_kind: kept of each kind.
        seed: of the choice.
    """

    def __init__(self, per_kind: int, seed: int) -> None:
        self._per_kind = per_kind
        self._random = random.Random(seed)
        self._kept: dict[str, list[Outcome]] = {}
        self._seen: dict[str, int] = {}

    def offer(self, outcome: Outcome) -> None:
        """Every answer of a kind has the same chance to be kept."""
        kind = outcome.act.kind
        kept, seen = self._kept.setdefault(kind, []), self._seen.get(kind, 0)
        self._seen[kind] = seen + 1
        if len(kept) < self._per_kind:
            kept.append(outcome)
        elif (place := self._random.randrange(seen + 1)) < self._per_kind:
            kept[place] = outcome

    @property
    def outcomes(self) -> list[Outcome]:
        """What was kept, in the order of the acts."""
        return sorted((outcome for kept in self._kept.values() for outcome in kept), key=lambda o: o.act.number)


class Oracle:
    """An engine that decodes one request at a time.

    Args:
        model: folder of the served checkpoint; None is the embedded model.
        max_model_len: as the server's.
    """

    def __init__(self, model: Path | None, max_model_len: int) -> None:
        self._llm = LLM(model, draft="off", max_num_seqs=1, enable_prefix_caching=False, max_model_len=max_model_len)

    def judge(self, outcome: Outcome, prompt_ids: Sequence[int]) -> Verdict:
        """Decode the request of an answer again and compare tokens and finish reasons."""
        body = outcome.act.body
        assert isinstance(body, Mapping)
        num_tokens = 0
        for index, sample in enumerate(outcome.samples):
            params = sampling_of(body, sample_seed(body["seed"], index))
            (alone,) = self._llm.generate([list(prompt_ids)], params)
            num_tokens += len(alone.token_ids)
            place = first_difference(alone.token_ids, sample.token_ids)
            if place is not None:
                return self._verdict(outcome, num_tokens, f"sample {index} differs at token {place}")
            if alone.finish_reason != sample.finish_reason or alone.text != sample.text:
                return self._verdict(outcome, num_tokens, f"sample {index} has the same tokens and another text or end")
        return self._verdict(outcome, num_tokens, "")

    def _verdict(self, outcome: Outcome, num_tokens: int, difference: str) -> Verdict:
        return Verdict(outcome.act.number, outcome.act.kind, num_tokens, difference)


def sampling_of(body: Mapping[str, Any], seed: int) -> SamplingParams:
    """Sampling parameters of a request of the mix, read without the server's own reader."""
    fields: dict[str, Any] = {name: body[name] for name in _PLAIN_FIELDS if name in body}
    if "logit_bias" in body:
        fields["logit_bias"] = {int(token_id): value for token_id, value in body["logit_bias"].items()}
    if "stop" in body:
        fields["stop"] = tuple(body["stop"])
    if (structured := _structured_of(body)) is not None:
        fields["structured"] = structured
    return SamplingParams(seed=seed, **fields)


def _structured_of(body: Mapping[str, Any]) -> StructuredOutput | None:
    if "response_format" in body:
        return StructuredOutput("json_schema", json.dumps(body["response_format"]["json_schema"]["schema"]))
    wanted = body.get("structured_outputs", {})
    if "regex" in wanted:
        return StructuredOutput("regex", wanted["regex"])
    return StructuredOutput("choice", tuple(wanted["choice"])) if "choice" in wanted else None
