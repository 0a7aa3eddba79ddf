"""Verification emits the accepted prefix and exactly one bonus, for every accept pattern and verify_len."""

import pytest
import torch

from dspark.config.errors import ConfigError
from dspark.config.sampling import SamplingParams
from dspark.sampling import RequestSampling, draw
from dspark.speculative import VerifySpan, verify

VOCAB = 9
GREEDY = SamplingParams()
RATIO = SamplingParams(temperature=1.0, sampler="ratio")


def one_hot_rows(token_ids):
    """Rows whose only possible token is given: every sampler must draw it."""
    logits = torch.full((len(token_ids), VOCAB), -1e4)
    logits[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 0.0
    return logits


def span(request_id, params, drafts):
    return VerifySpan(request_id, RequestSampling(params, 1, [1, 2, 3]), drafts)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0), RATIO], ids=["greedy", "keyed", "ratio"])
def test_every_accept_pattern(params, method):
    """S9: exactly accepted_len tokens, each once, whatever the pattern and the width."""
    for width in range(6):
        for right in range(width + 1):
            target = [4, 5, 6, 7, 8, 0][: width + 1]
            drafts = [token if k < right else 2 for k, token in enumerate(target[:width])]
            verdict = verify(one_hot_rows(target), [span("a", params, drafts)], rejection_sample_method=method)
            assert verdict.token_ids == [target[: right + 1]]
            assert verdict.num_accepted == [right]
            assert verdict.row_starts == [0]


def test_ragged_requests_of_all_samplers_keep_their_order():
    target = {"a": [4, 5, 6], "b": [7], "c": [1, 2], "d": [3, 4, 5, 6], "e": [8]}
    params = {"a": RATIO, "b": GREEDY, "c": SamplingParams(temperature=0.7), "d": RATIO, "e": RATIO}
    drafts = {"a": [4, 5], "b": [], "c": [8], "d": [3, 4, 1], "e": []}
    spans = [span(key, params[key], drafts[key]) for key in target]
    verdict = verify(one_hot_rows([token for tokens in target.values() for token in tokens]), spans)
    assert verdict.request_ids == tuple("abcde")
    assert verdict.token_ids == [[4, 5, 6], [7], [1], [3, 4, 5], [8]]
    assert verdict.num_accepted == [2, 0, 0, 2, 0]
    assert verdict.row_starts == [0, 3, 4, 6, 10]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_request_has_the_same_verdict_alone_and_in_a_batch(method):
    generator = torch.Generator().manual_seed(0)
    kinds = [GREEDY, RATIO, SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(repetition_penalty=1.5)]
    spans, logits = [], []
    for i in range(24):
        width = i % 5
        drafts = torch.randint(VOCAB, (width,), generator=generator).tolist()
        probabilities = torch.rand(width, VOCAB, generator=generator, dtype=torch.float64).softmax(-1)
        sampling = RequestSampling(kinds[i % 4], 1, list(range(1, 4 + i % 3)))
        spans.append(VerifySpan(i, sampling, drafts, probabilities if i % 8 < 4 else None))
        logits.append(torch.randn(width + 1, VOCAB, generator=generator))
    together = verify(torch.cat(logits), spans, rejection_sample_method=method)
    for i, (one, rows) in enumerate(zip(spans, logits, strict=True)):
        assert verify(rows, [one], rejection_sample_method=method).token_ids == [together.token_ids[i]]


def test_log_probabilities_can_be_found_by_row():
    """P5: token i of a span was emitted by row row_starts + i."""
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(3))
    best = logits.argmax(-1).tolist()
    spans = [span("a", GREEDY, [best[0], 0, 0]), span("b", GREEDY, best[4:6])]
    verdict = verify(logits, spans)
    for tokens, start in zip(verdict.token_ids, verdict.row_starts, strict=True):
        assert tokens == best[start : start + len(tokens)]


def test_penalties_count_the_drafts_before_a_row():
    """P2: a token that a draft has just used is penalised in the rows behind that draft, not before it."""
    params = SamplingParams(presence_penalty=1.0)
    logits = torch.zeros(3, VOCAB)
    logits[:, 4], logits[:, 5], logits[:, 6] = 0.9, 0.6, 0.3
    assert verify(logits, [span("a", params, [4, 5])]).token_ids == [[4, 5, 6]]


def test_keyed_bonus_is_the_plain_draw():
    params = SamplingParams(temperature=1.2, seed=9)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    sampling = RequestSampling(params, 1, [1, 2])
    first = draw(logits[:1], [sampling.row()]).item()
    assert verify(logits[:1], [VerifySpan(0, sampling)]).token_ids == [[first]]
    for draft in range(VOCAB):
        assert verify(logits, [VerifySpan(0, sampling, [draft, 0])]).token_ids[0][0] == first


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0), RATIO])
def test_padding_and_mask_bind_the_bonus(params):
    logits = torch.zeros(2, VOCAB)
    logits[:, 6:] = 30.0
    mask = torch.zeros(2, VOCAB, dtype=torch.bool)
    mask[:, [2, 8]] = True
    assert max(verify(logits, [span(0, params, [1])], num_valid_tokens=6).token_ids[0]) < 6
    assert verify(logits, [span(0, params, [2])], num_valid_tokens=6, mask=mask).token_ids == [[2, 2]]


def test_errors_name_the_values():
    with pytest.raises(ConfigError, match="2 rows of logits, but its requests need 3"):
        verify(torch.zeros(2, VOCAB), [span(0, GREEDY, [1, 2])])
    with pytest.raises(ConfigError, match="synthetic"):
        verify(torch.zeros(1, VOCAB), [span(0, GREEDY, [])], rejection_sample_method="synthetic")


def test_no_requests_is_no_verdict():
    verdict = verify(torch.zeros(0, VOCAB), [])
    assert verdict.token_ids == []
