"""Filters equal a plain per-row twin, in the documented order, with ties to the lower id.

The twin below works on one row with Python loops and whole stable sorts; the code under test works on all rows at once
and looks at the best candidates first. Not tested: numerical closeness to other engines.
"""

import math

import pytest
import torch
from torch import Tensor

from dspark.config.sampling import SamplingParams
from dspark.ops import filters
from dspark.ops.draw import filtered
from dspark.sampling import RowSampling, SamplingBatch, draw, filtered_probabilities
from dspark.sampling.adjust import adjust_logits


def plain_adjust(row: Tensor, sampling: RowSampling) -> Tensor:
    """Logit bias, repetition, presence and frequency penalties of one row."""
    params, row = sampling.params, row.float().clone()
    text = [*sampling.history, *sampling.tentative]
    output = text[sampling.prompt_len :]
    for token, value in (params.logit_bias or {}).items():
        row[token] += value
    for token in set(text):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty
    return row


def plain_kept(row: Tensor, params: SamplingParams) -> set[int]:
    """Ids that temperature, min-p, top-k, top-p leave of one adjusted row."""
    scaled = (row.double() - row.double().max()) / params.temperature
    order = sorted(range(len(row)), key=lambda v: (-scaled[v].item(), v))
    order = [v for v in order if scaled[v] > -math.inf]
    if params.min_p > 0:
        order = [v for v in order if scaled[v].exp() >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = [scaled[v].exp().item() for v in order]
        total, before, kept = sum(mass), 0.0, 0
        while kept < len(order) and before < params.top_p * total:
            before += mass[kept]
            kept += 1
        order = order[:kept]
    return set(order)


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=3),
    SamplingParams(temperature=0.8, top_p=0.7),
    SamplingParams(temperature=1.3, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=9, top_p=0.5, min_p=0.05),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, top_p=0.9),
    SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, repetition_penalty=0.8, frequency_penalty=-0.3, top_k=40),
    SamplingParams(temperature=1.0, logit_bias={2: 4.0, 5: -100.0}, top_k=4),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=0.01),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1.0, top_k=1000),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_filters_equal_the_plain_twin(params):
    logits = torch.randn(8, 60, generator=torch.Generator().manual_seed(3)) * 2
    rows = [RowSampling(params, 8, 3, [1, 2, 3, 7, 7, 2, 9], tentative=[7, i]) for i in range(8)]
    batch = SamplingBatch.build(rows, 60)
    adjusted = adjust_logits(logits, batch)
    expected = torch.stack([plain_adjust(row, sampling) for row, sampling in zip(logits, rows, strict=True)])
    torch.testing.assert_close(adjusted, expected, rtol=0, atol=2e-6)
    kept = filtered(adjusted, batch.sampled.params) > -torch.inf
    for t in range(8):
        assert set(kept[t].nonzero()[:, 0].tolist()) == plain_kept(adjusted[t], params)
    probabilities = filtered_probabilities(logits, rows)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(8, dtype=torch.float64))
    masked = adjusted.double().masked_fill(~kept, -torch.inf) / params.temperature
    torch.testing.assert_close(probabilities, masked.softmax(-1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("top_p", [0.3, 0.75, 1.0])
@pytest.mark.parametrize("top_k", [0, 5, 700])
def test_candidates_and_whole_sort_agree(monkeypatch, top_k, top_p):
    """The number of candidates looked at first is a matter of speed only."""
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(5)).mul(4).round().div(4)
    rows = [RowSampling(SamplingParams(temperature=0.5 + i, top_k=top_k, top_p=top_p), 4, 1) for i in range(6)]
    whole = filtered_probabilities(logits, rows)
    for candidates in (1, 4, 64):
        monkeypatch.setattr(filters, "CANDIDATES", candidates)
        assert torch.equal(filtered_probabilities(logits, rows), whole)


def test_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    for params, kept in (
        (SamplingParams(temperature=1.0, top_k=2), [1, 2]),
        (SamplingParams(temperature=1.0, top_p=0.5), [1, 2]),
        (SamplingParams(temperature=1.0, top_k=4), [0, 1, 2, 3]),
    ):
        probabilities = filtered_probabilities(logits, [RowSampling(params, 1, 1)])
        assert probabilities[0].nonzero()[:, 0].tolist() == kept
    assert draw(logits, [RowSampling(SamplingParams(), 1, 1)]).tolist() == [1]
    assert draw(logits, [RowSampling(SamplingParams(logit_bias={1: -1.0}), 1, 1)]).tolist() == [2]


@pytest.mark.parametrize("vocab_size", [5, 1000, 40_000, 129_280])
def test_argmax_takes_the_first_maximum(vocab_size):
    logits = torch.zeros(3, vocab_size)
    logits[1, vocab_size // 3] = logits[1, vocab_size - 1] = 1.0
    rows = [RowSampling(SamplingParams(), 1, 1)] * 3
    assert draw(logits, rows).tolist() == [0, vocab_size // 3, 0]
    assert draw(logits[1:2], rows[:1]).tolist() == [vocab_size // 3]


def test_top_p_is_a_share_of_what_min_p_and_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # top-k leaves 4/7 and 3/7: a share of 0.5 is reached by the first alone, 0.4 of the whole row is not.
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    assert filtered_probabilities(logits, [RowSampling(params, 1, 1)])[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    params = SamplingParams(temperature=1.0, min_p=0.7, top_p=0.6)
    kept = filtered_probabilities(logits, [RowSampling(params, 1, 1)])[0].nonzero()[:, 0].tolist()
    assert kept == [0, 1]


def test_presence_and_frequency_ignore_the_prompt_and_count_drafts():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    row = RowSampling(params, 6, 2, [0, 1, 2, 2], tentative=[2, 3])
    adjusted = adjust_logits(torch.zeros(1, 5), SamplingBatch.build([row], 5))
    assert adjusted[0].tolist() == [0.0, 0.0, -1.25, -0.75, 0.0]


def test_repetition_counts_prompt_output_and_drafts():
    row = RowSampling(SamplingParams(repetition_penalty=2.0), 4, 2, [0, 1, 2], tentative=[3])
    adjusted = adjust_logits(torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]]), SamplingBatch.build([row], 5))
    assert adjusted[0].tolist() == [0.5, -2.0, 0.5, -2.0, 1.0]


def test_advance_counts_like_a_longer_history():
    """A batch that advances token by token is the batch built from the longer text."""
    params = [
        SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(repetition_penalty=1.4),
    ]
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    tentative: list[list[int]] = [[], [], []]
    batch = SamplingBatch.build([RowSampling(p, 4, 2, [1, 2, 3, 3]) for p in params], 12)
    for step in range(4):
        rows = [RowSampling(p, 4 + step, 2, [1, 2, 3, 3], tuple(t)) for p, t in zip(params, tentative, strict=True)]
        drawn = draw(logits, batch)
        assert torch.equal(drawn, draw(logits, rows))
        assert torch.equal(filtered_probabilities(logits, batch), filtered_probabilities(logits, rows))
        batch = batch.advance(drawn)
        for text, token in zip(tentative, drawn.tolist(), strict=True):
            text.append(token)


def test_padding_ids_are_never_drawn():
    logits = torch.zeros(50, 16)
    logits[:, 12:] = 1000.0
    for params in (SamplingParams(), SamplingParams(temperature=2.0), SamplingParams(temperature=1.0, top_k=15)):
        rows = [RowSampling(params, t + 1, 1, [0]) for t in range(50)]
        assert draw(logits, rows, num_valid_tokens=12).max() < 12
        assert filtered_probabilities(logits, rows, num_valid_tokens=12).shape == (50, 12)


def test_mask_restricts_every_kind_of_row():
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(4, 20, dtype=torch.bool)
    mask[:, [3, 7]] = True
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=5, min_p=0.01),
        SamplingParams(logit_bias={4: 100.0}),
    ]
    drawn = draw(logits, [RowSampling(p, 1, 1, [0]) for p in params], mask=mask)
    assert set(drawn.tolist()) <= {3, 7}


def test_a_tiny_temperature_is_the_argmax():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    rows = [RowSampling(SamplingParams(temperature=1e-30), t, 1, [0]) for t in range(5)]
    assert torch.equal(draw(logits, rows), logits.argmax(-1))


def test_draws_follow_the_filtered_distribution():
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(4)).expand(8000, 8)
    params = SamplingParams(temperature=0.8, top_p=0.9)
    rows = [RowSampling(params, t, 1, [0]) for t in range(8000)]
    expected = filtered_probabilities(logits[:1], rows[:1])[0] * 8000
    counts = torch.bincount(draw(logits, rows), minlength=8).double()
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    chi_square = ((counts - expected)[inside] ** 2 / expected[inside]).sum().item()
    assert chi_square < 30
