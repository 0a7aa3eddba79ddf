"""Whole runs: tokens, model and loop put together; what `dspark train target`, `drafter` and `export` do."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.config.errors import DSparkError
from dspark.models.build import load_model
from dspark.train.checkpointing import CHECKPOINT_NAME, read_weights
from dspark.train.drafter import TrainingDrafter, Variant, new_drafter
from dspark.train.loop import LoopConfig, RunSummary, TrainingRun
from dspark.train.protocols import TrainableDrafter
from dspark.train.shards import read_split, tokenizer_digest
from dspark.train.target import TrainingTarget, new_target
from dspark.train.tasks import DraftTask, TargetTask, Task
from dspark.train.tokenizer import load_tokenizer
from dspark.train.windows import MIXTURE, TokenBatches, WindowSampler, describe_mixture

SUMMARY_NAME = "summary.json"
TARGET_TITLE = "target"


@dataclass(frozen=True)
class RunPlan:
    """Where a run reads and writes, and the shape of its batches.

    Attributes:
        tokens: folder of token shards.
        tokenizer: folder of the tokenizer files that made them.
        out: the run's folder.
        batch_size, seq_len: windows of an update and tokens that each of them predicts.
        device: "cuda", "cpu", or "auto" for the first that is there.
        compiled: fuse elementwise ops with the compiler.
        seed: of weights, data order and anchors.
    """

    tokens: Path
    tokenizer: Path
    out: Path
    batch_size: int = 64
    seq_len: int = 512
    device: str = "auto"
    compiled: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.seq_len < 16 or self.seq_len % 2:
            raise DSparkError(
                f"--batch-size {self.batch_size} must be at least 1, --seq-len {self.seq_len} even and at least 16"
            )


def choose_device(name: str, compiled: bool) -> torch.device:
    """Return the device of a run and set how it multiplies.

    Raises:
        DSparkError: CUDA was asked for and is not there.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise DSparkError(f"--device {name!r} is not known: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise DSparkError("--device cuda: no CUDA device is visible; use --device cpu")
    if compiled:
        # One fused op serves many shapes; falling back to eager code in silence would cost the run its time.
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 4096
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # on a CPU the setting would emulate bf16 products, many times slower
        torch.set_float32_matmul_precision("high")
    return device


def train_target(plan: RunPlan, config: LoopConfig) -> RunSummary:
    """Train the embedded model's target, or continue the run in plan.out."""
    device = choose_device(plan.device, plan.compiled)
    target = new_target(plan.tokenizer, device, plan.compiled, plan.seed)
    return _run(TARGET_TITLE, TargetTask(target), plan, config, device, {})


def train_drafters(
    plan: RunPlan, config: LoopConfig, target_folder: Path, variants: Sequence[Variant], anchors: int
) -> RunSummary:
    """Train drafters side by side against a frozen target, or continue the run in plan.out.

    Args:
        plan, config: see there.
        target_folder: a target's run, or a checkpoint in the official layout.
        variants: which drafters.
        anchors: draft blocks of a window.
    """
    device = choose_device(plan.device, plan.compiled)
    target = load_target(target_folder, plan.tokenizer, device, plan.compiled)
    drafters: dict[str, TrainableDrafter] = {
        variant: new_drafter(target, variant, plan.compiled, plan.seed) for variant in variants
    }
    task = DraftTask(drafters, target, anchors, plan.seed)
    return _run("drafter", task, plan, config, device, {"variants": ",".join(variants), "anchors": anchors})


def load_target(folder: Path, tokenizer: Path, device: torch.device | str, compiled: bool) -> TrainingTarget:
    """Return a frozen target from a training run or from a checkpoint in the official layout.

    Raises:
        DSparkError: the folder holds neither.
    """
    target = new_target(tokenizer, device, compiled)
    if (folder / CHECKPOINT_NAME).is_file():
        target.load_state_dict(read_weights(folder, device))
    elif (folder / "config.json").is_file():
        target.model.load_state_dict(load_model(folder).target.state_dict())
    else:
        raise DSparkError(f"{folder} is neither a target's run ({CHECKPOINT_NAME}) nor a checkpoint (config.json)")
    target.requires_grad_(False)
    return target.eval()


def load_drafter(folder: Path, variant: Variant, target: TrainingTarget) -> TrainingDrafter:
    """Return one drafter of a run of `train_drafters`.

    Raises:
        DSparkError: the run did not train that variant.
    """
    prefix = f"{variant}."
    weights = {name[len(prefix) :]: value for name, value in read_weights(folder).items() if name.startswith(prefix)}
    if not weights:
        raise DSparkError(f"the run in {folder} has no {variant} drafter")
    drafter = new_drafter(target, variant, compiled=False)
    drafter.load_state_dict(weights)
    return drafter


def _run(
    title: str, task: Task, plan: RunPlan, config: LoopConfig, device: torch.device, settings: dict[str, Any]
) -> RunSummary:
    tokenizer = load_tokenizer(plan.tokenizer)
    train = read_split(plan.tokens, tokenizer, "train", tuple(MIXTURE))
    heldout = read_split(plan.tokens, tokenizer, "heldout", tuple(MIXTURE))
    sampler = WindowSampler(train, MIXTURE, plan.seq_len + 1, plan.seed)
    batches = TokenBatches(sampler, plan.batch_size, device)
    settings = {
        **settings,
        "seq_len": plan.seq_len,
        "tokenizer": tokenizer_digest(tokenizer),
        "mixture": str(MIXTURE),
    }
    summary = TrainingRun(task, batches, heldout, config, plan.out, title, settings).run()
    record = {
        **asdict(summary),
        "batch_size": plan.batch_size,
        "seq_len": plan.seq_len,
        "seed": plan.seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "config": asdict(config),
        "mixture": MIXTURE,
        "epochs": sampler.epochs(summary.step * config.accumulate * plan.batch_size),
        "train_text": describe_mixture(train, tuple(train)),
        "heldout_text": describe_mixture(heldout, tuple(heldout)),
    }
    if title == TARGET_TITLE:
        record["heldout_bits_per_byte"] = {
            domain: figures["loss"] / math.log(2) / heldout[domain].bytes_per_token
            for domain, figures in summary.heldout.items()
        }
    (plan.out / SUMMARY_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return summary
