"""Losses in chunks equal a naive version in double precision, values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from dspark.train.losses import DraftLossWeights, balanced_bias, dspark_loss, position_weights, target_loss

N, G, D, V = 7, 5, 6, 11


class Heads(torch.nn.Module):
    """A shared head, a Markov table and a confidence vector in double precision."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Parameter(torch.randn(V, D, dtype=torch.float64))
        self.markov = torch.nn.Parameter(torch.randn(V, V, dtype=torch.float64))
        self.confidence = torch.nn.Parameter(torch.randn(D, dtype=torch.float64))

    def draft_logits(self, head_hidden, prev_ids):
        return head_hidden @ self.head.T + self.markov[prev_ids]

    def confidence_logits(self, confidence_hidden, prev_ids):
        return confidence_hidden @ self.confidence


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_target_loss_equals_cross_entropy_and_z_term(chunk_rows):
    hidden = torch.randn(13, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (13,))
    loss, entropy = target_loss(hidden, labels, lambda rows: rows @ weight.T, 0.1, chunk_rows)
    logits = hidden @ weight.T
    naive = F.cross_entropy(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(loss, naive)
    torch.testing.assert_close(entropy, F.cross_entropy(logits, labels).detach())
    for mine, theirs in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(naive, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def naive_dspark(heads, target_weight, head_hidden, confidence_hidden, target_rows, prev_ids, labels, valid, weights):
    total, norm = 0.0, 0.0
    for n in range(N):
        for k in range(G):
            if not valid[n, k]:
                continue
            logits = heads.head @ head_hidden[n, k] + heads.markov[prev_ids[n, k]]
            draft = logits.softmax(0)
            target = (target_weight @ target_rows[n, k]).softmax(0).detach()
            l1 = (draft - target).abs().sum()
            label = (1 - 0.5 * l1).detach()
            c = torch.sigmoid(heads.confidence @ confidence_hidden[n, k])
            bce = -(label * c.log() + (1 - label) * (1 - c).log())
            w = torch.exp(torch.tensor(-k / (weights.decay_len or G), dtype=torch.float64))
            total = total + w * (weights.ce * -draft[labels[n, k]].log() + weights.l1 * l1 + weights.confidence * bce)
            norm = norm + w
    return total / norm


@pytest.mark.parametrize("chunk_rows", [3, 1000])
@pytest.mark.parametrize("weights", [DraftLossWeights(), DraftLossWeights(0.5, 0.2, 0.7, decay_len=2.0)])
def test_dspark_loss_equals_the_naive_sum(chunk_rows, weights):
    heads = Heads()
    target_weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    rows = [torch.randn(N, G, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    prev_ids, labels = torch.randint(V, (2, N, G))
    valid = torch.rand(N, G) > 0.3
    measured = dspark_loss(
        heads, lambda r: r @ target_weight.T, *rows, prev_ids, labels, valid, weights, chunk_rows=chunk_rows
    )
    naive = naive_dspark(heads, target_weight, *rows, prev_ids, labels, valid, weights)
    torch.testing.assert_close(measured.loss, naive)
    learned = [*heads.parameters(), *rows[:2]]
    for mine, theirs in zip(
        torch.autograd.grad(measured.loss, learned, retain_graph=True), torch.autograd.grad(naive, learned), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    frozen = torch.autograd.grad(measured.loss, [rows[2], target_weight], allow_unused=True)
    assert frozen == (None, None)


def test_confidence_labels_carry_no_gradient_into_the_draft():
    heads = Heads()
    rows = [torch.randn(N, G, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    ids = torch.randint(V, (N, G))
    only = DraftLossWeights(ce=0.0, l1=0.0, confidence=1.0)
    loss = dspark_loss(heads, lambda r: r @ heads.head.T.detach(), *rows, ids, ids, torch.ones(N, G, dtype=bool), only)
    (grad,) = torch.autograd.grad(loss.loss, [rows[0]], allow_unused=True)
    assert grad is None or not grad.any()


def test_a_perfect_draft_overlaps_fully_and_agrees():
    heads = Heads()
    torch.nn.init.zeros_(heads.markov)
    rows = torch.randn(N, G, D, dtype=torch.float64)
    ids = torch.randint(V, (N, G))
    measured = dspark_loss(heads, lambda r: r @ heads.head.T, rows, rows, rows, ids, ids, torch.ones(N, G, dtype=bool))
    torch.testing.assert_close(measured.overlap, torch.ones(G, dtype=torch.float64))
    assert measured.agree.tolist() == [1.0] * G
    assert measured.rows.tolist() == [N] * G


def test_no_valid_row_is_a_zero_loss_and_not_a_nan():
    heads = Heads()
    rows = torch.randn(N, G, D, dtype=torch.float64)
    ids = torch.randint(V, (N, G))
    measured = dspark_loss(heads, lambda r: r @ heads.head.T, rows, rows, rows, ids, ids, torch.zeros(N, G, dtype=bool))
    assert measured.loss == 0


def test_position_weights_fall_by_e_over_the_block():
    weights = position_weights(5)
    assert weights[0] == 1
    assert weights[4] == pytest.approx(2.718281828459045 ** (-4 / 5))


def test_bias_moves_towards_unused_experts():
    bias = balanced_bias(torch.zeros(4), torch.tensor([10.0, 0.0, 5.0, 5.0]), 0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.0, 0.0]))
