"""The sampling probe: keyed requests keep their tokens under every kind of speculation, ratio requests their law."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dspark.config.sampling import SamplingParams
from dspark.sampling import RequestSampling, RowSampling, filtered_probabilities
from dspark.speculative.dspark import DraftBlock, DSparkProposer
from dspark.speculative.proposer import ContinuationProposer, ProposalRequest, Proposer, RequestId
from dspark.speculative.verify import RejectionMethod, VerifySpan, verify
from dspark.validate.lifecycle.driver import Driver
from dspark.validate.lifecycle.probe import ProbeResult
from dspark.validate.lifecycle.scenarios.prompts import prompt, settings
from dspark.validate.lifecycle.subject import Subject
from dspark.validate.lifecycle.wishes import Wish

SEEDS = (0, 1, 2**63 + 5)
TEMPERATURES = (0.0, 0.3, 1.0, 2.5)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"logit_bias": {4: 2.0, 5: -4.0}, "top_p": 0.95},
)
MAX_TOKENS = 12

# The chi-square test: texts of a tiny vocabulary, counted over many seeds.
VOCAB, TEXT_LEN, NUM_TEXTS, WIDTH = 4, 3, 4000, 2
# A right sampler falls below this once in ten thousand tests.
LEAST_P = 1e-4
LAWS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "temperature": 1.0},
}


def probe_keyed(subject: Subject) -> Iterator[ProbeResult]:
    """The keyed sampler through the engine: no drafts, the model's own, a mix of right and wrong ones."""
    yield from (_probe_keyed(subject, mode) for mode in ("off", "on", "forced mix"))


def probe_ratio() -> Iterator[ProbeResult]:
    """The ratio sampler in both forms, on a vocabulary small enough to know the law of every text."""
    methods: tuple[RejectionMethod, ...] = ("standard", "block")
    yield from (_probe_ratio(law, method) for law in LAWS for method in methods)


def _grid() -> list[SamplingParams]:
    """Seeds x temperatures x filters; at temperature 0 one seed is enough."""
    grid = []
    for temperature, chosen, seed in itertools.product(TEMPERATURES, FILTERS, SEEDS):
        if temperature > 0.0 or seed == SEEDS[0]:
            fields = {"temperature": temperature, "seed": seed, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            grid.append(SamplingParams(**fields, **chosen))
    return grid


def _probe_keyed(subject: Subject, mode: str) -> ProbeResult:
    """The grid in full batches, under one kind of speculation, against each request alone."""
    name = f"keyed sampler on {subject.name}, speculation {mode}"
    wishes = [Wish(prompt(subject, 3 + number % 5, number), params) for number, params in enumerate(_grid())]
    if mode == "on" and not subject.block_size:
        return ProbeResult(name, True, 0, "the model carries no draft stages")
    engine = settings(subject, max_num_seqs=16, **({} if mode == "on" else {"num_speculative_tokens": 0}))
    driver = Driver(subject, engine, _right_and_wrong(subject, wishes) if mode == "forced mix" else None)
    try:
        for number, wish in enumerate(wishes):
            driver.submit(number, wish)
        driver.run()
    except Exception as error:  # a crash of the engine is a finding like any other
        return ProbeResult(name, False, driver.events["tokens"], f"{type(error).__name__}: {error}")
    accepted = driver.events["accepted drafts"]
    is_ok = mode == "off" or accepted > 0
    found = f"the same tokens as alone, {accepted} of them accepted drafts"
    return ProbeResult(name, is_ok, driver.events["tokens"], found if is_ok else "no draft was accepted")


def _right_and_wrong(subject: Subject, wishes: Sequence[Wish]) -> Proposer:
    """A drafter whose first 0 to 5 drafts of a block are right, in a pattern of request and position."""
    width = max(subject.block_size, 1)
    texts: Mapping[RequestId, Sequence[int]] = {
        number: wish.prompt_ids + subject.oracle.answer(wish).token_ids for number, wish in enumerate(wishes)
    }

    def num_right(request_id: RequestId, anchor: int) -> int:
        assert isinstance(request_id, int)
        return (request_id + 3 * anchor) % (width + 1)

    return ContinuationProposer(texts, width, subject.num_valid_tokens, num_right=num_right)


class _Tables:
    """A target and a drafter of a few tokens: logits are rows of fixed random tables."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._target = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        self._base = torch.randn(VOCAB, WIDTH, VOCAB, generator=generator)
        self._markov = torch.randn(VOCAB, VOCAB, generator=generator)

    def target_rows(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [N, V] after texts of at least two tokens."""
        pairs = torch.tensor([text[-2:] for text in texts])
        return self._target[pairs[:, 0], pairs[:, 1]]

    def draft_block(self, requests: Sequence[ProposalRequest]) -> DraftBlock:
        """See `DraftModel.draft_block`."""
        anchors = torch.tensor([request.anchor_id for request in requests])
        return DraftBlock(self._base[anchors], self._base[anchors])

    def markov_bias(self, prev_ids: torch.Tensor) -> torch.Tensor:
        """See `DraftModel.markov_bias`."""
        return self._markov[prev_ids]

    def confidence_logits(self, hidden: torch.Tensor, prev_ids: torch.Tensor) -> None:
        """There is no confidence head."""

    def forget(self, request_id: RequestId) -> None:
        """Nothing is kept."""


def _probe_ratio(law: str, method: RejectionMethod) -> ProbeResult:
    """Texts of many seeds under the ratio test against the exact law of plain decoding."""
    tables, start = _Tables(seed=3), [1, 2]
    params = [SamplingParams(**LAWS[law], sampler="ratio", seed=seed) for seed in range(NUM_TEXTS)]
    texts = _speculate(tables, start, params, method)
    counts = Counter(map(tuple, texts))
    wanted = {text: chance * NUM_TEXTS for text, chance in _exact_law(tables, start, params[0]).items()}
    name = f"ratio sampler, {law}, {method}"
    impossible = [text for text in counts if wanted[text] == 0.0]
    if impossible:
        return ProbeResult(name, False, NUM_TEXTS, f"the text {impossible[0]} cannot be drawn, and was")
    chance = chi_square_p([counts[text] for text in wanted], list(wanted.values()))
    return ProbeResult(name, chance > LEAST_P, NUM_TEXTS, f"chi-square p {chance:.3g} over {len(wanted)} texts")


def _speculate(
    tables: _Tables, start: Sequence[int], params: Sequence[SamplingParams], method: RejectionMethod
) -> list[list[int]]:
    """Rounds of draft and verify until every text is long enough; verify lengths alternate, whatever was drafted."""
    proposer = DSparkProposer(tables, WIDTH)
    texts = [list(start) for _ in params]
    samplings = [RequestSampling(own, len(start), text) for own, text in zip(params, texts, strict=True)]
    while running := [number for number, text in enumerate(texts) if len(text) < len(start) + TEXT_LEN]:
        proposal = proposer.propose([ProposalRequest(number, samplings[number]) for number in running])
        assert proposal.draft_probabilities is not None
        spans = []
        for place, number in enumerate(running):
            drafts = proposal.token_ids[place, : WIDTH - number % 2].tolist()
            spans.append(VerifySpan(number, samplings[number], drafts, proposal.draft_probabilities[place]))
        rows = [[*span.sampling.history, *span.draft_ids[:k]] for span in spans for k in range(span.num_rows)]
        verdict = verify(tables.target_rows(rows), spans, rejection_sample_method=method)
        for number, tokens in zip(running, verdict.token_ids, strict=True):
            texts[number].extend(tokens)
    return [text[len(start) : len(start) + TEXT_LEN] for text in texts]


def _exact_law(tables: _Tables, start: Sequence[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every text under plain decoding."""
    law = {}
    for text in itertools.product(range(VOCAB), repeat=TEXT_LEN):
        chance = 1.0
        for k, token in enumerate(text):
            so_far = [*start, *text[:k]]
            row = RowSampling(params, len(so_far), len(start), so_far)
            chance *= float(filtered_probabilities(tables.target_rows([so_far]), [row])[0, token])
        law[text] = chance
    return law


def chi_square_p(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Chance that a right sampler is as far off (Pearson's test); cells that expect fewer than 5 are joined."""
    pairs = list(zip(observed, expected, strict=True))
    cells = [pair for pair in pairs if pair[1] >= 5.0]
    rest = [pair for pair in pairs if pair[1] < 5.0]
    if sum(wanted for _, wanted in rest) >= 1.0:
        cells.append((sum(seen for seen, _ in rest), sum(wanted for _, wanted in rest)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
