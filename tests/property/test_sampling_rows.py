"""The row law of sampling: a row's token and distribution do not depend on the rows that share the call.

Rows with mixed parameters are drawn together, permuted, split and alone; bits are compared. Half of the logits are
rounded to a coarse grid, so that ties at every cut are common.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config.sampling import SamplingParams
from dspark.sampling import RowSampling, Stream, draw, filtered_probabilities

VOCAB = 50

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 80]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.8, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    logit_bias=st.sampled_from([None, {3: 2.0}, {0: -50.0, 49: 1.5}]),
    seed=st.integers(0, 2**64 - 1),
)
row_strategy = st.builds(
    RowSampling,
    params=params_strategy,
    position=st.integers(0, 200_000),
    prompt_len=st.integers(0, 4),
    history=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=12),
    tentative=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    stream=st.sampled_from([Stream.TARGET, Stream.DRAFT]),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(row_strategy, min_size=2, max_size=9),
    seed=st.integers(0, 1000),
    coarse=st.booleans(),
    data=st.data(),
)
def test_a_row_is_drawn_alike_in_every_company(rows, seed, coarse, data):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    logits = logits.mul(2).round().div(2) if coarse else logits
    tokens, probabilities = draw(logits, rows), filtered_probabilities(logits, rows)
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(1, len(rows)))
    for part in (order, order[:cut], *[[t] for t in order]):
        picked = [rows[t] for t in part]
        assert torch.equal(draw(logits[part], picked), tokens[part])
        assert torch.equal(filtered_probabilities(logits[part], picked), probabilities[part])
    # What is drawn has probability.
    assert (probabilities.gather(1, tokens[:, None]) > 0).all()


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(row_strategy, min_size=1, max_size=6), seed=st.integers(0, 1000), padding=st.integers(1, 9))
def test_padding_columns_change_nothing(rows, seed, padding):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    padded = torch.cat([logits, torch.full((len(rows), padding), 99.0)], dim=1)
    assert torch.equal(draw(padded, rows, num_valid_tokens=VOCAB), draw(logits, rows))
