"""Log-probabilities are those of the raw row, exact to float32, with ties to the lower id."""

import pytest
import torch

from dspark.sampling import logprobs
from dspark.sampling.logprobs import best_ids


@pytest.mark.parametrize("vocab_size", [7, 8192, 129_280])
def test_values_equal_log_softmax(vocab_size):
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    token_ids = torch.arange(5)
    found = logprobs(logits, token_ids, top=4)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(found.token.double(), expected.gather(1, token_ids[:, None])[:, 0], rtol=1e-6, atol=2e-6)
    top = expected.topk(4, dim=-1)
    assert torch.equal(found.top_ids, top.indices)
    torch.testing.assert_close(found.top.double(), top.values, rtol=1e-6, atol=2e-6)


def test_a_row_alone_has_the_bits_of_a_row_in_a_batch():
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(1))
    token_ids = torch.arange(9) * 100
    together = logprobs(logits, token_ids, top=3)
    for t in range(9):
        alone = logprobs(logits[t : t + 1], token_ids[t : t + 1], top=3)
        assert torch.equal(alone.token, together.token[t : t + 1])
        assert torch.equal(alone.top, together.top[t : t + 1])
        assert torch.equal(alone.top_ids, together.top_ids[t : t + 1])


def test_padding_has_no_probability():
    logits = torch.zeros(1, 10)
    found = logprobs(logits, torch.tensor([3]), top=10, num_valid_tokens=8)
    assert found.top_ids.tolist() == [list(range(8))]
    torch.testing.assert_close(found.token, torch.tensor([1 / 8]).log())


def test_best_ids_break_ties_downwards_and_bear_infinities():
    inf = float("inf")
    values = torch.tensor([[1.0, 2.0, 2.0, 2.0], [-inf, -inf, 0.0, -inf]])
    assert best_ids(values, 2).tolist() == [[1, 2], [2, 0]]
    assert best_ids(values, 4).tolist() == [[1, 2, 3, 0], [2, 0, 1, 3]]
    assert best_ids(values, 0).shape == (2, 0)
