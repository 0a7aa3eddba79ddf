"""Proposers: one contract for all of them, and what the DSpark loop adds."""

import pytest
import torch

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.sampling import RequestSampling, RowSampling, Stream, draw, filtered_probabilities
from dspark.speculative import ContinuationProposer, DSparkProposer, NoProposer, ProposalRequest
from support.speculative_toys import ToyDraftModel

VOCAB, WIDTH = 11, 4


def requests(*params):
    texts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    return [ProposalRequest(f"r{i}", RequestSampling(p, 1, texts[i])) for i, p in enumerate(params)]


PROPOSERS = {
    "none": NoProposer,
    "continuation": lambda: ContinuationProposer({f"r{i}": range(10) for i in range(3)}, WIDTH, VOCAB),
    "dspark": lambda: DSparkProposer(ToyDraftModel(VOCAB, 5), WIDTH),
}


@pytest.mark.parametrize("make", PROPOSERS.values(), ids=PROPOSERS.keys())
def test_contract(make):
    """Order and keys are the caller's; a request's block does not depend on who else asks; forgetting is harmless."""
    asked = requests(SamplingParams(), SamplingParams(temperature=1.0, seed=4), SamplingParams(repetition_penalty=1.5))
    proposer = make()
    together = proposer.propose(asked)
    assert together.request_ids == ("r0", "r1", "r2")
    assert together.token_ids.shape == (3, proposer.num_speculative_tokens)
    assert together.token_ids.dtype == torch.int64
    assert together.width == proposer.num_speculative_tokens
    for order in ([2, 0, 1], [1], [0, 2]):
        part = proposer.propose([asked[i] for i in order])
        assert torch.equal(part.token_ids, together.token_ids[order])
        if together.confidence_logits is not None:
            assert torch.equal(part.confidence_logits, together.confidence_logits[order])
    proposer.forget("r0")
    proposer.forget("nobody")


def test_continuation_reads_absolute_positions_and_errs_on_request():
    text = [5, 6, 7, 8, 9, 10]
    proposer = ContinuationProposer(
        {"r0": text}, 3, VOCAB, num_right=lambda _, anchor: 1 if anchor == 2 else 3, confidence_logit=1.5
    )
    sampling = RequestSampling(SamplingParams(), 1, text[:3])
    proposal = proposer.propose([ProposalRequest("r0", sampling)])
    assert proposal.token_ids.tolist() == [[8, 10, 0]]
    assert proposal.confidence_logits.tolist() == [[1.5, 1.5, 1.5]]
    late = proposer.propose([ProposalRequest("r0", RequestSampling(SamplingParams(), 1, text[:5]))])
    assert late.token_ids.tolist() == [[10, 0, 0]]


@pytest.mark.parametrize("sampler", ["keyed", "ratio"])
@pytest.mark.parametrize("has_markov", [True, False])
def test_dspark_loop_equals_its_equation(sampler, has_markov):
    """Token k is drawn from U_k + B(x_{k-1}), its history being the drafts before it (eqs. 4, 5, 7)."""
    params = SamplingParams(temperature=0.8, top_k=6, repetition_penalty=1.3, frequency_penalty=0.2, sampler=sampler)
    [request] = requests(params)
    model = ToyDraftModel(VOCAB, 5, has_markov=has_markov)
    proposal = DSparkProposer(model, WIDTH).propose([request])
    block, drafts, prev = model.draft_block([request]), [], torch.tensor([request.anchor_id])
    for k in range(WIDTH):
        bias = model.markov_bias(prev)
        logits = block.base_logits[:, k] + (0 if bias is None else bias)
        stream = Stream.TARGET if sampler == "keyed" else Stream.DRAFT + 8 * k
        row = RowSampling(params, request.anchor_position + 1 + k, 1, request.sampling.history, tuple(drafts), stream)
        assert proposal.confidence_logits[0, k] == model.confidence_logits(block.hidden[:, k], prev)[0]
        if sampler == "ratio":
            assert torch.equal(proposal.draft_probabilities[:, k], filtered_probabilities(logits, [row]))
        prev = draw(logits, [row])
        drafts.append(prev.item())
    assert proposal.token_ids.tolist() == [drafts]
    assert (proposal.draft_probabilities is None) == (sampler == "keyed")


def test_greedy_requests_need_no_probabilities_even_under_the_ratio_test():
    proposal = DSparkProposer(ToyDraftModel(VOCAB, 5), WIDTH).propose(requests(SamplingParams(sampler="ratio")))
    assert proposal.draft_probabilities is None


def test_padding_is_never_proposed():
    asked = requests(
        SamplingParams(), SamplingParams(temperature=2.0), SamplingParams(temperature=1.0, sampler="ratio")
    )
    proposal = DSparkProposer(ToyDraftModel(VOCAB, 5, padding=6), 5, num_valid_tokens=VOCAB).propose(asked)
    assert proposal.token_ids.max() < VOCAB
    assert proposal.draft_probabilities.shape == (3, 5, VOCAB)


def test_bad_widths_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        DSparkProposer(ToyDraftModel(VOCAB, 5), 0)
    with pytest.raises(ConfigError, match="5 positions, fewer than num_speculative_tokens = 6"):
        DSparkProposer(ToyDraftModel(VOCAB, 5), 6).propose(requests(SamplingParams()))


def test_forget_reaches_the_model():
    model = ToyDraftModel(VOCAB, 5)
    DSparkProposer(model, WIDTH).forget("r7")
    assert model.forgotten == ["r7"]
