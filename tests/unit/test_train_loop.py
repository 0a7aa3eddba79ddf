"""The loop on a toy model: it learns, continues bit for bit, stops on Ctrl-C and on bad losses, and logs JSON lines."""

import io
import json
import os
import signal

import numpy as np
import pytest
import torch
from rich.console import Console

from dspark.config.errors import DSparkError
from dspark.train.checkpointing import CHECKPOINT_NAME
from dspark.train.loop import LoopConfig, TrainingRun
from dspark.train.protocols import DraftBlockRows, TargetFeatures
from dspark.train.reporting import RunDisplay
from dspark.train.schedule import Schedule
from dspark.train.tasks import DraftTask, TargetTask, draw_anchors
from dspark.train.tokenizer import EOS, TOKEN_ID
from dspark.train.tokens import TokenArray
from dspark.train.windows import TokenBatches, WindowSampler

V, D, WINDOW = 32, 16, 17
FAST = Schedule(warmup_steps=5)


class ToyTarget(torch.nn.Module):
    """Predicts the next token from this one and the one before it."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(V, D)
        self.mix = torch.nn.Linear(2 * D, D)
        self.head = torch.nn.Linear(D, V)

    def loss_rows(self, token_ids):
        x = self.embed(token_ids)
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
        return torch.tanh(self.mix(torch.cat((x, before), -1))).flatten(0, 1)

    def logits(self, hidden):
        return self.head(hidden)

    @torch.no_grad()
    def target_features(self, token_ids):
        hidden = self.loss_rows(token_ids).view(*token_ids.shape, D)
        return TargetFeatures(hidden, hidden)

    def auxiliary_loss(self):
        return torch.zeros(())

    def set_progress(self, progress):
        self.progress = progress

    def balance_experts(self, rate):
        pass


class ToyDrafter(torch.nn.Module):
    """Guesses from the last committed row and the anchor; a Markov table adds the previous token."""

    def __init__(self, target, block_size=3):
        super().__init__()
        self.block_size = block_size
        self.places = torch.nn.Linear(2 * D, self.block_size * D)
        self.markov = torch.nn.Embedding(V, V)
        self.confidence = torch.nn.Linear(D, 1)
        self.__dict__["target"] = target

    def draft(self, token_ids, anchors, target_hidden):
        window = torch.arange(len(anchors))[:, None]
        anchor = self.target.embed(token_ids[window, anchors]).detach()
        rows = self.places(torch.cat((target_hidden[window, anchors - 1], anchor), -1))
        rows = rows.view(*anchors.shape, self.block_size, D)
        return DraftBlockRows(rows, rows)

    def draft_logits(self, head_hidden, prev_ids):
        return self.target.logits(head_hidden) + self.markov(prev_ids)

    def confidence_logits(self, confidence_hidden, prev_ids):
        return self.confidence(confidence_hidden).squeeze(-1)

    def balance_experts(self, rate):
        pass


def tokens(seed, length=4000):
    """Documents of 40 tokens in which each token mostly decides the next."""
    rng = np.random.default_rng(seed)
    ids = [3]
    for _ in range(length - 1):
        ids.append(3 + (5 * ids[-1] + 7) % (V - 3) if rng.random() < 0.9 else int(rng.integers(3, V)))
    ids = np.array(ids, dtype=np.int16)
    ids[39::40] = TOKEN_ID[EOS]
    return TokenArray(ids, np.arange(0, length, 40), 3 * length)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def target_run(folder, config, **kwargs):
    torch.manual_seed(5)
    arrays = {"code": tokens(0), "chat": tokens(1)}
    batches = TokenBatches(WindowSampler(arrays, {"code": 3, "chat": 1}, WINDOW, seed=0), 8)
    return TrainingRun(TargetTask(ToyTarget()), batches, {"code": tokens(2, 400)}, config, folder, **kwargs)


def events(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def quiet():
    return RunDisplay("toy", Console(file=io.StringIO()), line_every_s=0)


def test_the_target_learns_and_the_log_tells_it(tmp_path):
    console = Console(file=io.StringIO())
    run = target_run(
        tmp_path, LoopConfig(steps=150, log_every=25, schedule=FAST), display=RunDisplay("toy", console, 0)
    )
    summary = run.run()
    assert summary.reason == "finished"
    assert summary.step == 150
    assert summary.tokens == 150 * 8 * WINDOW
    log = events(tmp_path)
    assert [log[0]["event"], log[-1]["event"]] == ["start", "end"]
    steps = [e for e in log if e["event"] == "step"]
    losses = [e["loss"] for e in steps]
    assert losses[-1] < 0.6 * losses[0]
    assert summary.heldout["code"]["loss"] < 2.0
    assert {"step", "progress", "elapsed_s", "tokens_per_s", "loss", "grad_norm", "lr_factor"} <= set(steps[0])
    assert len([e for e in log if e["event"] == "heldout"]) == 7
    assert "tok/s" in console.file.getvalue()


def test_a_continuation_is_bit_equal_to_an_unbroken_run(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    whole = target_run(tmp_path / "whole", LoopConfig(steps=12), display=quiet())
    whole.run()

    config = LoopConfig(steps=12)
    broken = target_run(tmp_path / "broken", config, display=quiet())
    real_update = broken._update

    def interrupt_at_five(progress, meter):
        real_update(progress, meter)
        if broken.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    broken._update = interrupt_at_five
    assert broken.run().reason == "interrupted"
    assert broken.step == 5

    torch.manual_seed(99)
    again = target_run(tmp_path / "broken", config, display=quiet())
    assert again.step == 5
    assert again.run().reason == "finished"
    for name, value in whole.task.module.state_dict().items():
        assert torch.equal(value, again.task.module.state_dict()[name]), name
    assert signal.getsignal(signal.SIGINT) is before


def test_other_settings_do_not_continue_a_run(tmp_path):
    target_run(tmp_path, LoopConfig(steps=2), display=quiet()).run()
    with pytest.raises(DSparkError, match="seed was 0, is 1"):
        target_run(tmp_path, LoopConfig(steps=2, seed=1), display=quiet())
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"half")
    with pytest.raises(DSparkError, match="damaged"):
        target_run(tmp_path, LoopConfig(steps=2), display=quiet())


def test_time_ends_a_run_and_keeps_room_for_the_last_files(tmp_path):
    time = [0.0]

    def now():
        time[0] += 0.01
        return time[0]

    run = target_run(tmp_path, LoopConfig(minutes=0.5, log_every=5), display=quiet(), now=now)
    summary = run.run()
    assert summary.reason == "finished"
    assert 0.7 * 30 < summary.elapsed_s <= 30.0
    assert [e["event"] for e in events(tmp_path)][-3:] == ["heldout", "checkpoint", "end"]


def test_lasting_non_finite_gradients_stop_the_run_with_the_step(tmp_path):
    run = target_run(tmp_path, LoopConfig(steps=50, max_skips=2), display=quiet())
    before = {name: value.clone() for name, value in run.task.module.state_dict().items()}
    inner = run.task.loss
    run.task.loss = lambda ids, step: (inner(ids, step)[0] * float("nan"), {})
    with pytest.raises(DSparkError, match="step 2, for the 3th"):
        run.run()
    assert all(torch.equal(value, before[name]) for name, value in run.task.module.state_dict().items())
    assert [e["event"] for e in events(tmp_path)].count("skip") == 3


def test_accumulated_batches_equal_one_large_batch(tmp_path):
    def gradient(accumulate, batch_size):
        torch.manual_seed(5)
        batches = TokenBatches(WindowSampler({"code": tokens(0)}, {"code": 1}, WINDOW, seed=0), batch_size)
        folder = tmp_path / str(accumulate)
        run = TrainingRun(
            TargetTask(ToyTarget()), batches, {}, LoopConfig(steps=1, accumulate=accumulate), folder, display=quiet()
        )
        run.run()
        return next(e for e in events(folder) if e["event"] == "step")["grad_norm"]

    assert gradient(1, 8) == pytest.approx(gradient(2, 4), rel=1e-4)


def test_the_drafter_learns_from_a_frozen_target(tmp_path):
    torch.manual_seed(5)
    target = ToyTarget()
    arrays = {"code": tokens(0)}
    batches = TokenBatches(WindowSampler(arrays, {"code": 1}, WINDOW, seed=0), 8)
    TrainingRun(
        TargetTask(target), batches, {}, LoopConfig(steps=150, schedule=FAST), tmp_path / "target", display=quiet()
    ).run()
    frozen = {name: value.clone() for name, value in target.state_dict().items()}
    target.requires_grad_(False)
    task = DraftTask({"dspark": ToyDrafter(target), "mtp": ToyDrafter(target, 1)}, target, anchors_per_window=6)
    run = TrainingRun(
        task,
        batches,
        {"code": tokens(2, 400)},
        LoopConfig(steps=150, num_evals=1, schedule=FAST),
        tmp_path / "draft",
        display=quiet(),
    )
    summary = run.run()
    first = next(e for e in events(tmp_path / "draft") if e["event"] == "heldout")["domains"]["code"]
    last = summary.heldout["code"]
    assert last["loss"] < first["loss"]
    assert last["dspark.overlap_1"] > first["dspark.overlap_1"] + 0.2
    assert last["dspark.accepted_len_ratio"] > last["mtp.accepted_len_ratio"] > 1
    assert {f"dspark.{name}_{k}" for name in ("overlap", "agree", "confidence") for k in (1, 2, 3)} < set(last)
    assert "mtp.overlap_2" not in last
    assert all(torch.equal(value, frozen[name]) for name, value in target.state_dict().items())


def test_anchors_leave_context_below_and_a_block_above():
    anchors = draw_anchors((4, 20), 5, 8, (0, 3))
    assert anchors.min() >= 1
    assert anchors.max() + 5 <= 19
    assert (anchors.diff(dim=1) > 0).all()
    assert torch.equal(anchors, draw_anchors((4, 20), 5, 8, (0, 3)))
    assert not torch.equal(anchors, draw_anchors((4, 20), 5, 8, (0, 4)))
    with pytest.raises(ValueError, match="anchor positions"):
        draw_anchors((4, 10), 5, 8, (0, 0))
