"""The training loop: batches, updates, held-out figures, checkpoints; ends by steps, by time, or by Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.config.errors import DSparkError
from dspark.train.checkpointing import RunState, generator_states, read_state, restore_generators, write_state
from dspark.train.optimizer import OptimizerConfig, TrainOptimizer
from dspark.train.reporting import IntervalMeter, JsonlLog, RunDisplay
from dspark.train.schedule import RunClock, Schedule
from dspark.train.tasks import Task
from dspark.train.tokens import TokenArray
from dspark.train.windows import TokenBatches, heldout_batches


@dataclass(frozen=True)
class LoopConfig:
    """How a run goes.

    Attributes:
        steps: limit in updates; None for none.
        minutes: limit in wall-clock time over all lives of the run, last evaluation and file included.
        seed: of torch's generators at the start.
        accumulate: batches of one update.
        log_every: steps between two log lines.
        num_evals: held-out evaluations, spread evenly over the progress; the last one always runs.
        heldout_batches: batches of each domain in an evaluation, of the training batch's shape.
        checkpoint_minutes: time between two checkpoints; the last one is always written.
        max_skips: updates in a row that a non-finite gradient may cost before the run stops.
        optimizer, schedule: rates.
    """

    steps: int | None = None
    minutes: float | None = None
    seed: int = 0
    accumulate: int = 1
    log_every: int = 20
    num_evals: int = 6
    heldout_batches: int = 1
    checkpoint_minutes: float = 3.0
    max_skips: int = 5
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class RunSummary:
    """What a run did.

    Attributes:
        reason: "finished" or "interrupted".
        step: updates done; of them `skipped` had a non-finite gradient and changed nothing.
        tokens: tokens read.
        elapsed_s: seconds over all lives.
        train_loss: mean of the last logged interval.
        heldout: figure by domain and name.
    """

    reason: str
    step: int
    skipped: int
    tokens: int
    elapsed_s: float
    train_loss: float
    heldout: dict[str, dict[str, float]]


class TrainingRun:
    """One run of a task.

    Args:
        task: what is trained.
        batches: training windows by step.
        heldout: held-out tokens by domain.
        config: see `LoopConfig`.
        folder: holds the checkpoint and log.jsonl; a checkpoint found there is continued.
        title: for the display.
        settings: further plain values that a continuation must repeat.
        display: tests pass their own.
        now: monotonic seconds.

    Raises:
        DSparkError: the folder's checkpoint is damaged or belongs to other settings.
    """

    def __init__(
        self,
        task: Task,
        batches: TokenBatches,
        heldout: Mapping[str, TokenArray],
        config: LoopConfig,
        folder: Path,
        title: str = "train",
        settings: Mapping[str, Any] | None = None,
        display: RunDisplay | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task = task
        self.config = config
        self.step = 0
        self.skipped = 0
        self._batches = batches
        self._heldout = dict(heldout)
        self._folder = folder
        self._settings = {**_comparable(config), **dict(settings or {}), "batch_size": batches.batch_size}
        self._log = JsonlLog(folder / "log.jsonl")
        self._display = display or RunDisplay(title)
        self._now = now
        torch.manual_seed(config.seed)
        self._optimizer = TrainOptimizer(task.module.named_parameters(), config.optimizer, clip_group=task.clip_group)
        self._device = self._optimizer.parameters[0].device
        spent_s = self._restore()
        self._clock = RunClock(config.steps, config.minutes, spent_s, now)
        self._costs: dict[str, float | None] = {"heldout": None, "checkpoint": None}
        self._interrupted = False
        self._skips_in_a_row = 0
        self._figures: dict[str, float] = {}
        self._heldout_figures: dict[str, dict[str, float]] = {}

    def run(self) -> RunSummary:
        """Train until a limit or an interruption; the checkpoint on disk then holds the last step.

        Raises:
            DSparkError: the loss or gradient stayed non-finite for more than `max_skips` updates in a row.
        """
        self._log.write("start", step=self.step, config=asdict(self.config), settings=self._settings)
        with self._display, self._stop_on_signal():
            self._loop()
            if not self._interrupted:
                self._evaluate()
            self._save()
        return self._summarise()

    def _loop(self) -> None:
        next_eval = self._clock.progress(self.step)
        saved_at = self._now()
        meter = IntervalMeter(self._now)
        while not self._interrupted and (progress := self._clock.progress(self.step)) < 1.0:
            if progress >= next_eval:
                self._evaluate()
                next_eval = max(next_eval, progress) + 1 / max(1, self.config.num_evals)
                meter.restart()
            self._update(progress, meter)
            if self.step % self.config.log_every == 0:
                self._report(meter)
            if self._now() - saved_at >= 60 * self.config.checkpoint_minutes:
                self._save()
                saved_at = self._now()
                meter.restart()
        if meter.steps:
            self._report(meter)

    def _update(self, progress: float, meter: IntervalMeter) -> None:
        """One optimizer step over `accumulate` batches."""
        factor = self.config.schedule.factor(progress, self.step)
        self.task.before_step(progress)
        for part in range(self.config.accumulate):
            token_ids = self._batches.batch(self.step * self.config.accumulate + part)
            loss, figures = self.task.loss(token_ids, self.step * self.config.accumulate + part)
            (loss / self.config.accumulate).backward()
            meter.add({"loss": loss.detach(), **figures})
        norm = self._optimizer.step(factor)
        if norm is None:
            self._skip()
        else:
            self._skips_in_a_row = 0
            self.task.after_step(factor)
            meter.last = {"grad_norm": norm, "lr_factor": factor}
        meter.steps += 1
        meter.tokens += self.config.accumulate * self._batches.tokens_per_batch
        self.step += 1

    def _skip(self) -> None:
        self.skipped += 1
        self._skips_in_a_row += 1
        self._log.write("skip", step=self.step, skipped=self.skipped)
        if self._skips_in_a_row > self.config.max_skips:
            raise DSparkError(
                f"loss or gradient is not finite at step {self.step}, for the {self._skips_in_a_row}th step in a row: "
                f"lower the learning rates; the last good state is in {self._folder}"
            )

    def _report(self, meter: IntervalMeter) -> None:
        self._figures, rate = meter.take()
        progress = self._clock.progress(self.step)
        self._log.write(
            "step", step=self.step, progress=progress, elapsed_s=self._clock.elapsed_s(), tokens_per_s=rate,
            **self._figures,
        )  # fmt: skip
        self._display.update(
            progress, self.step, self._figures.get("loss", float("nan")), rate, self._clock.remaining_s(progress)
        )

    def _evaluate(self) -> None:
        """Measure every held-out domain and log it."""
        began = self._now()
        self.task.module.train(False)
        self._heldout_figures = {domain: self._measure(array) for domain, array in self._heldout.items()}
        self.task.module.train(True)
        self._note_cost("heldout", began)
        self._log.write(
            "heldout", step=self.step, elapsed_s=self._clock.elapsed_s(), seconds=self._costs["heldout"],
            domains=self._heldout_figures,
        )  # fmt: skip
        if self._heldout_figures:
            shown = "  ".join(f"{domain} {figures['loss']:.3f}" for domain, figures in self._heldout_figures.items())
            self._display.say(f"held-out at step {self.step}: {shown}")

    def _measure(self, array: TokenArray) -> dict[str, float]:
        sums: dict[str, list[float]] = {}
        windows = heldout_batches(
            array,
            self._batches.sampler.window_len,
            self._batches.batch_size,
            self.config.heldout_batches,
            self._device,
        )
        for token_ids in windows:
            for name, (value, count) in self.task.heldout(token_ids).sums.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += count
        return {name: value / max(count, 1e-9) for name, (value, count) in sums.items()}

    def _save(self) -> None:
        began = self._now()
        write_state(
            self._folder,
            RunState(
                step=self.step,
                elapsed_s=self._clock.elapsed_s(),
                settings=self._settings,
                weights=dict(self.task.module.state_dict()),
                optimizer=self._optimizer.state_dict(),
                generators=generator_states(),
                skipped=self.skipped,
            ),
        )
        self._note_cost("checkpoint", began)
        self._log.write("checkpoint", step=self.step, seconds=self._costs["checkpoint"])

    def _restore(self) -> float:
        """Continue from the folder's checkpoint; returns the seconds already spent."""
        saved = read_state(self._folder, self._settings, self._device)
        if saved is None:
            return 0.0
        self.task.module.load_state_dict(saved.weights)
        self._optimizer.load_state_dict(saved.optimizer)
        restore_generators(saved.generators)
        self.step, self.skipped = saved.step, saved.skipped
        return saved.elapsed_s

    def _note_cost(self, what: str, began: float) -> None:
        """What follows the last step must fit into the budget: keep as much as it cost last time, and a little.

        The first evaluation of a process says nothing: it may compile the model.
        """
        first = self._costs[what] is None
        self._costs[what] = self._now() - began
        if not (first and what == "heldout"):
            self._clock.reserve(2.0 + 1.5 * sum(cost for cost in self._costs.values() if cost is not None))

    def _summarise(self) -> RunSummary:
        summary = RunSummary(
            reason="interrupted" if self._interrupted else "finished",
            step=self.step,
            skipped=self.skipped,
            tokens=self.step * self.config.accumulate * self._batches.tokens_per_batch,
            elapsed_s=self._clock.elapsed_s(),
            train_loss=self._figures.get("loss", float("nan")),
            heldout=self._heldout_figures,
        )
        self._log.write("end", **asdict(summary))
        return summary

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """Ctrl-C ends the run after the step in flight; a second one ends it at once, without a new file."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: object) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            self._display.say("stopping after this step; press Ctrl-C again to stop at once")

        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, action in previous.items():
                signal.signal(number, action)


def _comparable(config: LoopConfig) -> dict[str, Any]:
    """Return the settings whose change would make a continuation another run; limits and logging may change."""
    return {
        "seed": config.seed,
        "accumulate": config.accumulate,
        "optimizer": str(asdict(config.optimizer)),
        "schedule": str(asdict(config.schedule)),
    }
