"""Muon's arithmetic, the split of parameters, the clip, and progress in steps or time."""

import pytest
import torch

from dspark.config.errors import DSparkError
from dspark.train.optimizer import Muon, OptimizerConfig, TrainOptimizer, is_hidden_matrix, orthogonalise
from dspark.train.schedule import RunClock, Schedule


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (3, 32, 8)])
def test_singular_values_are_near_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(*shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_stack_of_experts_moves_like_its_matrices_alone():
    grads = torch.randn(3, 8, 4)
    stacked = torch.nn.Parameter(torch.zeros(3, 8, 4))
    alone = [torch.nn.Parameter(torch.zeros(8, 4)) for _ in range(3)]
    together, apart = Muon([stacked]), Muon(alone)
    for _ in range(2):
        stacked.grad = grads.clone()
        for parameter, grad in zip(alone, grads, strict=True):
            parameter.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in alone]), rtol=1e-5, atol=1e-6)


def test_tables_heads_and_vectors_are_not_muons():
    matrix, vector = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4))
    experts = torch.nn.Parameter(torch.zeros(2, 4, 4))
    assert is_hidden_matrix("layers.0.attn.wq_a.weight", matrix)
    assert is_hidden_matrix("layers.0.ffn.experts.w13", experts)
    assert is_hidden_matrix("layers.2.attn.compressor.wgate.weight", matrix)
    for name in ("embed.weight", "head.weight", "layers.0.ffn.gate.weight", "layers.0.hc_attn.fn"):
        assert not is_hidden_matrix(name, matrix)
    assert not is_hidden_matrix("layers.0.attn_norm.weight", vector)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_training_lowers_a_regression_loss(kind):
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = TrainOptimizer(model.named_parameters(), OptimizerConfig(adam_lr=1e-2, kind=kind))
    x = torch.randn(64, 8)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(120):
        loss = (model(x) - y).square().mean()
        loss.backward()
        assert optimizer.step(1.0) is not None
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_a_non_finite_gradient_changes_nothing():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = TrainOptimizer([("w", parameter)], OptimizerConfig())
    (parameter * float("nan")).sum().backward()
    assert optimizer.step(1.0) is None
    assert torch.equal(parameter.detach(), torch.ones(4, 4))
    assert parameter.grad is None


def test_nothing_to_train_and_unknown_kinds_are_refused():
    with pytest.raises(DSparkError, match="nothing to train"):
        TrainOptimizer([("w", torch.nn.Parameter(torch.ones(2, 2), requires_grad=False))], OptimizerConfig())
    with pytest.raises(DSparkError, match="sgd"):
        OptimizerConfig(kind="sgd")


def test_schedule_rises_holds_and_falls_to_the_end():
    schedule = Schedule(warmup_steps=9, hold=0.5)
    assert [schedule.factor(p, 100) for p in (0.0, 0.5, 0.75, 1.0)] == pytest.approx([1, 1, 0.5, 0])
    assert [schedule.factor(0.0, step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert Schedule(0, 0.0, 0.1, "cosine").factor(1.0, 0) == pytest.approx(0.1)
    for wrong in ({"warmup_steps": -1}, {"hold": 1.0}):
        with pytest.raises(DSparkError, match="warm-up"):
            Schedule(**wrong)


def test_progress_is_the_larger_share_and_never_falls():
    time = [0.0]
    clock = RunClock(100, 1.0, now=lambda: time[0])
    assert clock.progress(10) == pytest.approx(0.1)
    time[0] = 30.0
    assert clock.progress(20) == pytest.approx(0.5)
    clock.reserve(10.0)
    assert clock.progress(20) == pytest.approx(0.6)
    assert clock.remaining_s(0.6) == pytest.approx(20.0)
    time[0] = 50.0
    assert clock.progress(20) == 1.0
    resumed = RunClock(None, 1.0, spent_s=45.0, now=lambda: time[0])
    assert resumed.progress(0) == pytest.approx(0.75)
    with pytest.raises(DSparkError, match="--steps"):
        RunClock(None, None)
