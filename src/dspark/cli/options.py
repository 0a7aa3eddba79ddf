"""The flags that several commands share, named as in the config, and what they turn into."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.bench.geometry import geometry_names
from dspark.cli.prompt import checked_text
from dspark.config import Config
from dspark.config.checks import require_int
from dspark.config.errors import DSparkError
from dspark.config.sampling import SamplingParams

DEFAULTS = SamplingParams()


class ExactnessChoice(StrEnum):
    """Whose products are used."""

    EXACT = "exact"
    FAST = "fast"


class EngramTablesChoice(StrEnum):
    """Where Engram tables lie."""

    DEVICE = "device"
    PINNED = "pinned"
    MAPPED = "mapped"


class DraftChoice(StrEnum):
    """Who proposes tokens."""

    DSPARK = "dspark"
    OFF = "off"


Model = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="Folder of a checkpoint; the embedded model without it.")
]
Draft = Annotated[DraftChoice, typer.Option("--draft", help="Who proposes tokens; off decodes plainly.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the most likely token.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the smallest set of tokens that reaches this share.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the most likely one.")]
Seed = Annotated[int, typer.Option("--seed", help="Key of the noise; the same seed draws the same tokens.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the output; may be repeated.")]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Requests that run at once.")]
MaxNumBatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", help="Rows of one pass at most.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Tokens of a request at most; the model's limit without it.")
]
EngramTables = Annotated[
    EngramTablesChoice,
    typer.Option("--engram-tables", help="Beside the weights, in pinned host memory, or mapped from their file."),
]
Exactness = Annotated[
    ExactnessChoice,
    typer.Option("--exactness", help="fast may use the vendor's products; tokens may then depend on the batch."),
]
TensorParallelSize = Annotated[int, typer.Option("--tensor-parallel-size", help="Ranks that share every layer.")]
ExpertParallel = Annotated[bool, typer.Option("--enable-expert-parallel", help="Give whole experts to ranks.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Also write a picture (PNG; needs matplotlib).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Geometry = Annotated[
    str, typer.Option("--geometry", metavar="NAME|FILE", help=f"{' or '.join(geometry_names())}, or a config.json.")
]
Layers = Annotated[int | None, typer.Option("--layers", help="The first so many layers only.")]
RequestCounts = Annotated[str, typer.Option("--requests", help="Requests at once, with commas between them.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the JSON object of the last line to a file.")
]


def require_positive(**counts: int | None) -> None:
    """Refuse counts below 1; each is named as its option is, with underscores, and None where it was not given.

    Raises:
        DSparkError: the first one that is too small.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise DSparkError(f"--{name.replace('_', '-')} is {count}: give at least 1")


def rank_settings(tensor_parallel_size: int, enable_expert_parallel: bool = False) -> dict[str, Any]:
    """The config's fields that divide the model; none where nothing is divided.

    Raises:
        ConfigError: there is not even one rank.
    """
    require_int("tensor_parallel_size", tensor_parallel_size, low=1)
    wanted = {"tensor_parallel_size": tensor_parallel_size, "enable_expert_parallel": enable_expert_parallel}
    return {name: value for name, value in wanted.items() if value != getattr(Config, name)}


def sampling_params(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int, max_tokens: int, stop: list[str] | None
) -> SamplingParams:
    """The checked parameters of one request.

    Raises:
        DSparkError: a value is out of range, or text is not valid UTF-8; the message names it.
    """
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(checked_text(text, "--stop") for text in stop or ()),
    )
