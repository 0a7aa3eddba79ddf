"""Losslessness through the whole loop, with toy models: keyed requests keep their tokens, ratio requests their law.

Keyed: any drafter, any accept pattern and any sequence of verify lengths give the tokens of plain decoding, for every
filter and penalty, in a batch of requests with different parameters. Ratio: chi-square over short texts of many seeds.
Not tested here: the engine's state; the toys compute logits from the whole text.
"""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dspark.config.sampling import SamplingParams
from dspark.sampling import RowSampling, filtered_probabilities
from dspark.speculative import ContinuationProposer, DSparkProposer, NoProposer
from support.speculative_toys import ToyDraftModel, ToyTarget, generate

VOCAB = 12

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([None, {1: 1.5, 4: -3.0}]),
    seed=st.integers(0, 2**64 - 1),
)
request_strategy = st.tuples(params_strategy, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(request_strategy, min_size=1, max_size=3),
    widths=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    rights=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    kind=st.sampled_from(["dspark", "continuation"]),
)
def test_keyed_tokens_are_those_of_plain_decoding(requests, widths, rights, kind):
    target = ToyTarget(VOCAB)
    plain = [generate(target, [request], 12, NoProposer())[0] for request in requests]
    if kind == "dspark":
        proposer = DSparkProposer(ToyDraftModel(VOCAB, 5), 5)
    else:
        texts = {i: [*prompt, *plain[i]] for i, (_, prompt) in enumerate(requests)}
        proposer = ContinuationProposer(texts, 5, VOCAB, num_right=lambda i, anchor: rights[(i + anchor) % len(rights)])
    together = generate(
        target, requests, 12, proposer, choose=lambda n, i, width: min(widths[(n + i) % len(widths)], width)
    )
    assert together == plain


def test_right_drafts_are_accepted_whole():
    """The equality above is not won by rejecting everything."""
    target, params = ToyTarget(VOCAB), SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=5)
    plain = generate(target, [(params, [1, 2])], 18, NoProposer())[0]
    rounds = []
    proposer = ContinuationProposer({0: [1, 2, *plain]}, 5, VOCAB)

    def choose(round_index, request, width):
        rounds.append(round_index)
        return width

    assert generate(target, [(params, [1, 2])], 18, proposer, choose=choose)[0] == plain
    assert len(rounds) == 3


def test_shared_noise_accepts_as_often_as_coupling_promises():
    """At least (1 - TV) / (1 + TV) of first drafts agree (Daliri et al. 2024)."""
    generator = torch.Generator().manual_seed(8)
    target_row, draft_row = torch.randn(2, VOCAB, generator=generator)
    rows = [RowSampling(SamplingParams(temperature=1.0, seed=seed), 1, 1, [0]) for seed in range(4000)]
    distance = 0.5 * (target_row.double().softmax(-1) - draft_row.double().softmax(-1)).abs().sum().item()

    class Constant(ToyTarget):
        def rows(self, texts):
            return target_row.expand(len(texts), VOCAB)

    class ConstantDraft(ToyDraftModel):
        def draft_block(self, requests):
            block = super().draft_block(requests)
            block.base_logits[:] = draft_row
            return block

    proposer = DSparkProposer(ConstantDraft(VOCAB, 1, has_markov=False), 1)
    requests = [(row.params, [0]) for row in rows]
    first = generate(Constant(VOCAB), requests, 1, NoProposer())
    drafts = []

    class Recorder:
        num_speculative_tokens = 1

        def propose(self, asked):
            proposal = proposer.propose(asked)
            drafts.extend(proposal.token_ids[:, 0].tolist())
            return proposal

        def forget(self, request_id):
            pass

    assert generate(Constant(VOCAB), requests, 1, Recorder()) == first
    agreed = sum(draft == tokens[0] for draft, tokens in zip(drafts, first, strict=True)) / len(first)
    assert agreed > (1 - distance) / (1 + distance) - 0.03


SMALL, LENGTH, COUNT = 4, 3, 1500
LAWS = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.02},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"temperature": 1.2, "logit_bias": {0: 1.0, 3: -1.0}},
}


def exact_law(target, params, prompt):
    """Probability of every text of LENGTH tokens under plain decoding."""
    law = {}
    for text in itertools.product(range(SMALL), repeat=LENGTH):
        chance = 1.0
        for k in range(LENGTH):
            so_far = [*prompt, *text[:k]]
            row = RowSampling(params, len(so_far), len(prompt), so_far)
            chance *= filtered_probabilities(target.row(so_far)[None], [row])[0, text[k]].item()
        law[text] = chance
    return law


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("sampler", "method"), [("keyed", "standard"), ("ratio", "standard"), ("ratio", "block")])
def test_chi_square_over_the_whole_loop(sampler, method, law):
    target, prompt = ToyTarget(SMALL, seed=3, scale=1.0), [1, 2]
    params = [SamplingParams(**LAWS[law], sampler=sampler, seed=seed) for seed in range(COUNT)]
    proposer = DSparkProposer(ToyDraftModel(SMALL, 2), 2)
    texts = generate(target, [(p, prompt) for p in params], LENGTH, proposer, method=method)
    counts = Counter(map(tuple, texts))
    expected = exact_law(target, params[0], prompt)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert all(expected[text] > 0 for text in counts)
    common = [text for text, p in expected.items() if p * COUNT >= 5]
    observed = [counts[text] for text in common]
    wanted = [expected[text] * COUNT for text in common]
    rest = COUNT - sum(wanted)
    if rest > 1e-6 * COUNT:
        observed.append(COUNT - sum(observed))
        wanted.append(rest)
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_ratio_request_is_reproducible_and_independent_of_its_batch(method):
    target, proposer = ToyTarget(VOCAB), DSparkProposer(ToyDraftModel(VOCAB, 5), 5)
    requests = [(SamplingParams(temperature=1.0, sampler="ratio", seed=seed), [seed % VOCAB]) for seed in range(6)]
    together = generate(target, requests, 10, proposer, method=method)
    for request, tokens in zip(requests, together, strict=True):
        assert generate(target, [request], 10, proposer, method=method) == [tokens]
    assert len(set(map(tuple, together))) > 1
