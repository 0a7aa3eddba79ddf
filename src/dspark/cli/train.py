"""`dspark train`: make the embedded model, from its tokenizer to its files."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import exit_codes
from dspark.cli.console import note, out, print_json, progress
from dspark.cli.session import model_folder
from dspark.config.errors import DSparkError
from dspark.train.corpus import DOMAINS, SPLITS, read_documents, sample_texts
from dspark.train.drafter import VARIANTS, Variant
from dspark.train.export import export_model
from dspark.train.loop import LoopConfig, RunSummary
from dspark.train.optimizer import OptimizerConfig
from dspark.train.runs import RunPlan, load_drafter, load_target, train_drafters, train_target
from dspark.train.schedule import Schedule
from dspark.train.shards import shard_file, tokenizer_digest, write_shard
from dspark.train.tokenizer import load_tokenizer, train_tokenizer, write_tokenizer
from dspark.train.tokens import TokenArray, encode_documents, limit_tokens

train_app = typer.Typer(
    help="Train a small model: tokenizer, tokens, target, drafter, export. Long runs resume from their --out folder.",
    no_args_is_help=True,
)

Corpus = Annotated[
    Path, typer.Option("--corpus", metavar="DIR", help="Folder of train-DOMAIN.jsonl.xz and heldout-DOMAIN.jsonl.xz.")
]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder of tokenizer.json; the embedded one without it."),
]
Tokens = Annotated[Path, typer.Option("--tokens", metavar="DIR", help="Folder of shards from `dspark train tokens`.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to; created when missing.")]
RunFolder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of the run; a run found there is continued.")
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same result.")]
Minutes = Annotated[
    float | None, typer.Option("--minutes", help="Wall-clock limit, last evaluation and file included.")
]
Steps = Annotated[int | None, typer.Option("--steps", help="Limit in updates; the first limit reached ends the run.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Windows of one batch.")]
SeqLen = Annotated[int, typer.Option("--seq-len", help="Tokens that a window predicts.")]
Accumulate = Annotated[int, typer.Option("--accumulate", help="Batches of one update.")]
MuonLr = Annotated[float, typer.Option("--muon-lr", help="Peak rate of the hidden matrices.")]
AdamLr = Annotated[float, typer.Option("--adam-lr", help="Peak rate of vectors, gates and heads.")]
EmbedLr = Annotated[float, typer.Option("--embed-lr", help="Peak rate of embedding tables.")]
WarmupSteps = Annotated[int, typer.Option("--warmup-steps", help="Updates in which the rates rise.")]
Hold = Annotated[float, typer.Option("--hold", help="Share of the run before the rates fall to zero.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="muon, or adamw for every parameter.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="Fuse elementwise ops with the compiler.")]
Evals = Annotated[int, typer.Option("--evals", help="Held-out evaluations over the run, the last one not counted.")]
Json = Annotated[bool, typer.Option("--json", help="Print the closing summary as JSON.")]


@train_app.command("tokenizer")
def tokenizer(
    corpus: Corpus,
    out_folder: Out,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Tokens, special ones included.")] = 4096,
    sample_mb: Annotated[float, typer.Option("--sample-mb", help="Megabytes of text from each domain.")] = 10.0,
    seed: Seed = 0,
) -> None:
    """Learn a byte-level BPE from an equal share of every domain; writes the tokenizer files of a checkpoint."""
    if not 0 < sample_mb < math.inf:
        raise DSparkError(f"--sample-mb is {sample_mb}: give a positive number of megabytes")
    with progress() as display:
        task = display.add_task("reading", total=None)
        texts = list(sample_texts(corpus, int(sample_mb * 1e6), seed))
        display.update(task, description=f"merging {len(texts)} texts")
        learned = train_tokenizer(texts, vocab_size)
    for path in write_tokenizer(learned, out_folder):
        note(f"wrote {path}")


@train_app.command("tokens")
def tokens(
    corpus: Corpus,
    out_folder: Out,
    tokenizer_folder: TokenizerFolder = None,
    max_mtokens: Annotated[
        float | None, typer.Option("--max-mtokens", help="At most this many million training tokens a domain.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Encode the corpus into token shards, which a training machine opens in seconds."""
    learned = load_tokenizer(model_folder(tokenizer_folder))
    digest = tokenizer_digest(learned)
    if max_mtokens is not None and not 1 <= max_mtokens * 1e6 < math.inf:
        raise DSparkError(f"--max-mtokens is {max_mtokens}: give a positive number of million tokens")
    limit = None if max_mtokens is None else int(max_mtokens * 1e6)
    with progress() as display:
        task = display.add_task("encoding", total=len(SPLITS) * len(DOMAINS))
        for split in SPLITS:
            for domain in DOMAINS:
                array = encode_documents(learned, read_documents(corpus, split, domain))
                if limit is not None and split == "train":
                    array = limit_tokens(array, limit, seed)
                path = shard_file(out_folder, split, domain)
                write_shard(path, array, digest)
                display.advance(task)
                out.print(_shard_line(f"{split} {domain}", array, path.stat().st_size))


def _shard_line(name: str, array: TokenArray, num_bytes: int) -> str:
    tokens, density = array.num_tokens / 1e6, array.bytes_per_token
    return f"{name:14} {tokens:8.2f} M tokens  {density:.2f} bytes/token  {num_bytes / 1e6:6.2f} MB"


@train_app.command("target")
def target(
    tokens_folder: Tokens,
    out_folder: RunFolder,
    tokenizer_folder: TokenizerFolder = None,
    minutes: Minutes = None,
    steps: Steps = None,
    batch_size: BatchSize = 64,
    seq_len: SeqLen = 512,
    accumulate: Accumulate = 1,
    optimizer: Optimizer = "muon",
    muon_lr: MuonLr = 0.02,
    adam_lr: AdamLr = 2e-3,
    embed_lr: EmbedLr = 4e-3,
    warmup_steps: WarmupSteps = 100,
    hold: Hold = 0.4,
    evals: Evals = 6,
    device: Device = "auto",
    compiled: Compile = True,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train the embedded model's target on token shards, or continue the run in --out."""
    plan = RunPlan(
        tokens_folder, model_folder(tokenizer_folder), out_folder, batch_size, seq_len, device, compiled, seed
    )
    rates = OptimizerConfig(muon_lr=muon_lr, adam_lr=adam_lr, embed_lr=embed_lr, kind=optimizer)
    config = LoopConfig(
        steps, minutes, seed, accumulate, num_evals=evals, optimizer=rates, schedule=Schedule(warmup_steps, hold)
    )
    _close(train_target(plan, config), as_json)


@train_app.command("drafter")
def drafter(
    target_folder: Annotated[
        Path, typer.Option("--target", metavar="DIR", help="A target's run folder, or a checkpoint.")
    ],
    tokens_folder: Tokens,
    out_folder: RunFolder,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            help="dspark, parallel (no Markov head) or mtp (one stage, one token); may be repeated. All without it.",
        ),
    ] = None,
    tokenizer_folder: TokenizerFolder = None,
    minutes: Minutes = None,
    steps: Steps = None,
    batch_size: BatchSize = 64,
    seq_len: SeqLen = 512,
    accumulate: Accumulate = 1,
    anchors: Annotated[int, typer.Option("--anchors", help="Draft blocks of a window.")] = 32,
    optimizer: Optimizer = "muon",
    muon_lr: MuonLr = 0.02,
    adam_lr: AdamLr = 2e-3,
    embed_lr: EmbedLr = 4e-3,
    warmup_steps: WarmupSteps = 100,
    hold: Hold = 0.4,
    evals: Evals = 4,
    device: Device = "auto",
    compiled: Compile = True,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train drafters side by side against a frozen target, or continue the run in --out."""
    variants = _variants(variant)
    plan = RunPlan(
        tokens_folder, model_folder(tokenizer_folder), out_folder, batch_size, seq_len, device, compiled, seed
    )
    if not 1 <= anchors <= seq_len - 8:
        raise DSparkError(f"--anchors is {anchors}: windows of {seq_len} tokens hold 1 to {seq_len - 8} blocks")
    rates = OptimizerConfig(muon_lr=muon_lr, adam_lr=adam_lr, embed_lr=embed_lr, weight_decay=0.0, kind=optimizer)
    config = LoopConfig(
        steps, minutes, seed, accumulate, num_evals=evals, optimizer=rates, schedule=Schedule(warmup_steps, hold)
    )
    _close(train_drafters(plan, config, target_folder, variants, anchors), as_json)


@train_app.command("export")
def export(
    target_folder: Annotated[
        Path, typer.Option("--target", metavar="DIR", help="A target's run folder, or a checkpoint.")
    ],
    out_folder: Out,
    drafter_folder: Annotated[
        Path | None, typer.Option("--drafter", metavar="DIR", help="A drafters' run folder; without it no draft.")
    ] = None,
    variant: Annotated[str, typer.Option("--variant", help="Which of its drafters.")] = "dspark",
    tokenizer_folder: TokenizerFolder = None,
) -> None:
    """Write a trained model as a checkpoint in the official layout."""
    (chosen,) = _variants([variant])
    tokenizer_files = model_folder(tokenizer_folder)
    trained = load_target(target_folder, tokenizer_files, "cpu", compiled=False)
    draft = None if drafter_folder is None else load_drafter(drafter_folder, chosen, trained)
    export_model(trained, draft, out_folder, tokenizer_files)
    total = sum(path.stat().st_size for path in out_folder.iterdir() if path.is_file())
    note(f"wrote {out_folder}: {total / 1e6:.1f} MB")


def _variants(names: list[str] | None) -> list[Variant]:
    """Check the names of variants; all of them for none."""
    wrong = sorted(set(names or ()) - set(VARIANTS))
    if wrong:
        raise DSparkError(f"--variant {', '.join(wrong)} is not known: choose from {', '.join(VARIANTS)}")
    return [variant for variant in VARIANTS if not names or variant in names]


def _close(summary: RunSummary, as_json: bool) -> None:
    """Print what a run did; an interrupted one says so to the shell as well."""
    if as_json:
        print_json(asdict(summary))
    else:
        minutes, seconds = divmod(int(summary.elapsed_s), 60)
        out.print(
            f"{summary.reason} at step {summary.step}: {summary.tokens / 1e6:.1f} M tokens in {minutes}:{seconds:02d}, "
            f"{summary.skipped} updates skipped, training loss {summary.train_loss:.4f}"
        )
        for domain, figures in summary.heldout.items():
            shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items() if not name[-1].isdigit())
            out.print(f"held-out {domain:6} {shown}")
    if summary.reason == "interrupted":
        raise typer.Exit(exit_codes.INTERRUPTED)
