"""The ratio test keeps the target's distribution exactly: all outcomes of a round are enumerated and summed.

For every draft text the law of the emitted tokens is computed from the acceptance chances and the residual that the
code uses; what a round leaves open is continued with the target itself. The sum must be the target's law, to rounding.
The appendix of the DSpark paper shows how a look-ahead schedule breaks this; its numbers are reproduced here.
"""

import itertools
import operator

import pytest
import torch

from dspark.config.sampling import SamplingParams
from dspark.sampling import RequestSampling
from dspark.speculative import VerifySpan, schedule_lengths, verify
from dspark.speculative.rejection import (
    RatioBatch,
    block_acceptance,
    first_failure,
    last_distributions,
    longest_prefix,
    one_hot,
    residual,
    token_acceptance,
)

VOCAB = 3


def chains(seed):
    """Random conditional distributions of target and draft: text so far -> [V]; some tokens are filtered out."""
    tables: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)

    def conditional(name, text):
        if (name, text) not in tables:
            row = torch.rand(VOCAB, generator=generator, dtype=torch.float64)
            if torch.rand(1, generator=generator) < 0.3:
                row[int(torch.randint(VOCAB, (1,), generator=generator))] = 0.0
            tables[name, text] = row / row.sum()
        return tables[name, text]

    return conditional


def batch_of(targets, drafts, draft_ids):
    """A batch of requests that all have two-digit keys of no importance."""
    keys = torch.arange(len(draft_ids))
    return RatioBatch(torch.cat(targets), torch.cat(drafts), draft_ids, keys, keys)


def accepted_law(method, chances):
    """Probability of each num_accepted of one request."""
    if method == "standard":
        reach = list(itertools.accumulate(chances, operator.mul, initial=1.0))
        return [reach[n] * (1 - chance) for n, chance in enumerate(chances)] + [reach[-1]]
    law, above = [], 1.0
    for chance in reversed(chances):
        law.append(above * chance)
        above *= 1 - chance
    return [above, *reversed(law)]


def outcomes(method, batch):
    """For each request a list over num_accepted of (probability, law [V] of the token after)."""
    acceptance = (block_acceptance if method == "block" else token_acceptance)(batch)
    laws = [accepted_law(method, chances) for chances in acceptance.chances]
    found = [[] for _ in laws]
    for n in range(max(map(len, laws))):
        accepted = [min(n, width) for width in batch.widths]
        weights = [w[k] for w, k in zip(acceptance.weights, accepted, strict=True)]
        last = last_distributions(batch, accepted, weights)
        for request, law in enumerate(laws):
            if n < len(law):
                found[request].append((law[n], last[request] / last[request].sum()))
    return found


def text_law(conditional, name, length, prefix=()):
    """Law of the next `length` tokens of a chain."""
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, v): p * float(conditional(name, (*prefix, *text))[v])
            for text, p in law.items()
            for v in range(VOCAB)
        }
    return law


def round_law(method, conditional, width):
    """Law of the first width + 1 tokens when one round is followed by plain target draws, and the mean accepted."""
    law = {drafts: p for drafts, p in text_law(conditional, "draft", width).items() if p > 0}
    targets = [torch.stack([conditional("target", text[:k]) for k in range(width + 1)]) for text in law]
    drafts = [torch.stack([conditional("draft", text[:k]) for k in range(width)]) for text in law]
    found = outcomes(method, batch_of(targets, drafts, list(law)))
    out, mean = {}, 0.0
    for (text, chance), results in zip(law.items(), found, strict=True):
        for n, (p, last) in enumerate(results):
            mean += chance * p * n
            for v in range(VOCAB):
                emitted = (*text[:n], v)
                for rest, q in text_law(conditional, "target", width - n, emitted).items():
                    key = (*emitted, *rest)
                    out[key] = out.get(key, 0.0) + chance * p * float(last[v]) * q
    return out, mean


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_round_has_the_targets_law_and_block_verification_accepts_no_less(seed, width):
    conditional = chains(seed)
    expected = text_law(conditional, "target", width + 1)
    standard, standard_mean = round_law("standard", conditional, width)
    block, block_mean = round_law("block", conditional, width)
    for law in (standard, block):
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
        assert all(law.get(text, 0.0) == pytest.approx(p, abs=1e-12) for text, p in expected.items())
    assert block_mean >= standard_mean - 1e-12


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_given_draft_is_one_hot(method):
    """P3: drafts without probabilities are tested as certain, which also keeps the law."""
    conditional = chains(11)
    texts = list(itertools.product(range(VOCAB), repeat=2))
    targets = [torch.stack([conditional("target", text[:k]) for k in range(3)]) for text in texts]
    drafts = [one_hot(text, VOCAB, torch.device("cpu")) for text in texts]
    for text, results in zip(texts, outcomes(method, batch_of(targets, drafts, texts)), strict=True):
        first = torch.zeros(VOCAB, dtype=torch.float64)
        for n, (p, last) in enumerate(results):
            first += p * (last if n == 0 else one_hot(text[:1], VOCAB, last.device)[0])
        torch.testing.assert_close(first, conditional("target", ()))


def test_ragged_requests_have_the_outcomes_they_have_alone():
    conditional = chains(5)
    texts = [(0, 1, 2), (), (2,), (1, 1), ()]
    targets = [torch.stack([conditional("target", text[:k]) for k in range(len(text) + 1)]) for text in texts]
    drafts = [
        torch.stack([conditional("draft", text[:k]) for k in range(len(text))]) if text else torch.empty(0, VOCAB)
        for text in texts
    ]
    for method in ("standard", "block"):
        together = outcomes(method, batch_of(targets, drafts, texts))
        for i, text in enumerate(texts):
            [alone] = outcomes(method, batch_of(targets[i : i + 1], drafts[i : i + 1], [text]))
            assert len(alone) == len(text) + 1
            for (p, last), (q, other) in zip(alone, together[i], strict=True):
                assert p == q
                assert torch.equal(last, other)


def test_counting_rules():
    assert first_failure([0.1, 0.6, 0.1], [0.5, 0.5, 0.5]) == 1
    assert longest_prefix([0.1, 0.6, 0.1], [0.5, 0.5, 0.5]) == 3
    assert first_failure([0.9], [0.0]) == longest_prefix([0.9], [0.0]) == 0
    assert first_failure([0.9, 0.9], []) == longest_prefix([0.9, 0.9], []) == 0


def test_equal_distributions_accept_everything():
    row = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    batch = batch_of([row.expand(3, VOCAB)], [row.expand(2, VOCAB)], [(2, 0)])
    assert token_acceptance(batch).chances == [[1.0, 1.0]]
    assert block_acceptance(batch).chances == [[1.0, 1.0]]
    assert torch.equal(residual(row, row, torch.ones(1, dtype=torch.float64)), row)


# Appendix A: one request, two drafts. A = 0, B = 1.
CURVE = [0.0, 1.0, 0.5, 0.45]
TARGET_ROW = torch.tensor([0.7, 0.3], dtype=torch.float64)
DRAFT_ROW = torch.tensor([0.5, 0.5], dtype=torch.float64)


def appendix_survival(first_draft):
    """a_1 = 0.8; c_2 = 0.9 after A and 0 after B."""
    return [[0.8, 0.8 * (0.9 if first_draft == 0 else 0.0)]]


@pytest.mark.parametrize(("search", "expected"), [("global", 0.85), ("early_stop", 0.7)])
def test_appendix_a_ratio_test(search, expected):
    """A global search lets the draft's content decide whether it is tested: P(A) becomes 0.85 instead of 0.7."""
    chance_of_a = 0.0
    for first in (0, 1):
        [width] = schedule_lengths(appendix_survival(first), CURVE, search=search)
        if width == 0:
            chance_of_a += 0.5 * float(TARGET_ROW[0])
            continue
        batch = batch_of([TARGET_ROW.expand(2, 2)], [DRAFT_ROW[None]], [(first,)])
        [[(rejected, rest), (accepted, _)]] = outcomes("standard", batch)
        chance_of_a += 0.5 * (accepted * (first == 0) + rejected * float(rest[0]))
    assert chance_of_a == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("search", ["global", "early_stop"])
def test_appendix_a_keyed_sampling(search):
    """The keyed token is the same whatever was scheduled."""
    logits = TARGET_ROW.log().float().expand(3, 2)
    for seed in range(50):
        sampling = RequestSampling(SamplingParams(temperature=1.0, seed=seed), 1, [0])
        plain = verify(logits[:1], [VerifySpan(0, sampling)]).token_ids[0][0]
        for first in (0, 1):
            [width] = schedule_lengths(appendix_survival(first), CURVE, search=search)
            drafts = [first, 0][:width]
            emitted = verify(logits[: width + 1], [VerifySpan(0, sampling, drafts)]).token_ids[0]
            assert emitted[0] == plain
