"""`dspark doctor`: what would run, what is refused, and the memory it takes, from metadata alone."""

from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import exit_codes, options
from dspark.cli.console import fail, note, out, print_json
from dspark.cli.options import DraftChoice, EngramTablesChoice, ExactnessChoice
from dspark.cli.session import model_folder, model_name
from dspark.config import Config, SpeculativeConfig
from dspark.config.errors import DSparkError
from dspark.engine.device import engine_facts
from dspark.validate.doctor import DoctorReport, examine
from dspark.validate.doctor_table import closing_lines, opening_lines, tables

DEFAULTS = Config()


def doctor(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="Folder of a checkpoint, or a config.json; the embedded model without it."
        ),
    ] = None,
    draft: options.Draft = DraftChoice.DSPARK,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", help="Draft tokens a round; the trained width without it.")
    ] = None,
    tensor_parallel_size: options.TensorParallelSize = DEFAULTS.tensor_parallel_size,
    enable_expert_parallel: options.ExpertParallel = DEFAULTS.enable_expert_parallel,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="Storage of window and compressed rows: bf16, fp32.")
    ] = DEFAULTS.kv_cache_dtype,
    index_cache_dtype: Annotated[
        str, typer.Option("--index-cache-dtype", help="Storage of index keys: fp8, fp4, bf16.")
    ] = DEFAULTS.index_cache_dtype,
    max_num_seqs: options.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    max_model_len: options.MaxModelLen = None,
    engram_tables: options.EngramTables = EngramTablesChoice.DEVICE,
    exactness: options.Exactness = ExactnessChoice.EXACT,
    as_json: options.Json = False,
) -> None:
    """Read only metadata; say what would run, what is refused and why, and the memory. Exits 1 if it would not run."""
    speculative = None
    if draft is not DraftChoice.OFF:
        speculative = SpeculativeConfig(method="dspark", num_speculative_tokens=num_speculative_tokens)
    elif num_speculative_tokens is not None:
        raise DSparkError("--num-speculative-tokens has no meaning with --draft off: leave one of them out")
    config = Config(
        model=str(model) if model else None,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]  # checked by Config, with a sentence
        index_cache_dtype=index_cache_dtype,  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        engram_tables=engram_tables.value,
        exactness=exactness.value,
        speculative_config=speculative,
    )
    report = examine(model_folder(model), config, engine=engine_facts(), name=model_name(model), is_draft_optional=True)
    if as_json:
        print_json(report.as_json())
    else:
        show(report)
    if not report.is_healthy:
        raise typer.Exit(exit_codes.FAILED)


def show(report: DoctorReport) -> None:
    """Print a report for people: what it is, the tables, and last what would go wrong."""
    for line in opening_lines(report):
        out.print(line)
    for table in tables(report):
        out.print()
        out.print(table)
    out.print()
    for line in closing_lines(report):
        out.print(line)
    for sentence in (*report.admission.notes, *report.admission.remarks):
        note(f"note: {sentence}")
    for sentence in report.refusals:
        fail(sentence)
