"""`dspark serve`: the model behind an OpenAI-compatible address."""

import logging
import sys
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.cli import options
from dspark.cli.console import note, out
from dspark.cli.files import read_text
from dspark.cli.options import DraftChoice, EngramTablesChoice, ExactnessChoice, require_positive
from dspark.cli.session import require_folder
from dspark.config import Config, SpeculativeConfig
from dspark.config.errors import DSparkError
from dspark.config.speculative_json import read_speculative_json
from dspark.engine.assembly import outline
from dspark.engine.async_engine import AsyncEngine
from dspark.engine.speculation import default_speculation
from dspark.serve.settings import ServerSettings

DEFAULTS = Config()
SERVER_DEFAULTS = ServerSettings()
EMBEDDED_NAME = "dspark-embedded"
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "jinja2")


class MetricsPrefix(StrEnum):
    """What the names of metrics begin with."""

    DSPARK = "dspark"
    VLLM = "vllm"


class LogLevel(StrEnum):
    """What is logged on stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    model: options.Model = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = SERVER_DEFAULTS.host,
    port: Annotated[int, typer.Option("--port", help="Port to listen at; 0 takes a free one.")] = SERVER_DEFAULTS.port,
    draft: options.Draft = DraftChoice.DSPARK,
    speculative_config: Annotated[
        str | None,
        typer.Option("--speculative-config", metavar="JSON", help='Such as {"num_speculative_tokens": 5}.'),
    ] = None,
    tensor_parallel_size: options.TensorParallelSize = DEFAULTS.tensor_parallel_size,
    enable_expert_parallel: options.ExpertParallel = DEFAULTS.enable_expert_parallel,
    rank_timeout: Annotated[
        float, typer.Option("--rank-timeout", help="Seconds in which a rank must answer, and end a pass.")
    ] = DEFAULTS.rank_timeout_s,
    max_num_seqs: options.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    max_model_len: options.MaxModelLen = None,
    max_num_pages: Annotated[
        int | None, typer.Option("--max-num-pages", help="Pages of growing storage; sized by the engine without it.")
    ] = None,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Compute every prompt from its first token.")
    ] = False,
    engram_tables: options.EngramTables = EngramTablesChoice.DEVICE,
    exactness: options.Exactness = ExactnessChoice.EXACT,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="What clients call the model; may be repeated, the first is shown."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", help="Ask clients for this key; may be repeated. Others here can see it: use a file."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Read keys from a file, one a line.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="A web origin that may call the server; may be repeated.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", help="Requests that wait at most; more are answered 429.")
    ] = SERVER_DEFAULTS.max_waiting,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds after which a request is ended.")
    ] = SERVER_DEFAULTS.request_timeout_s,
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", help="Longest request body.")
    ] = SERVER_DEFAULTS.max_body_bytes,
    metrics_prefix: Annotated[
        MetricsPrefix, typer.Option("--metrics-prefix", help="What the names of metrics begin with.")
    ] = MetricsPrefix.DSPARK,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="Seconds that running requests have after a signal to end.")
    ] = SERVER_DEFAULTS.drain_s,
    replicas: Annotated[
        int, typer.Option("--replicas", help="Engines behind the address, as Ray Serve replicas; 1 needs no Ray.")
    ] = 1,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="What is logged on stderr.")] = LogLevel.INFO,
) -> None:
    """Serve a model to OpenAI clients: completions, chat, streams, metrics. Ctrl-C or SIGTERM drains and ends it."""
    _require_packages("serve", _PACKAGES)
    require_positive(replicas=replicas)
    settings = ServerSettings(
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or [EMBEDDED_NAME if model is None else model.resolve().name]),
        api_keys=(*(api_key or ()), *_keys_in(api_key_file)),
        cors_origins=tuple(cors_origin or ()),
        max_waiting=max_waiting,
        request_timeout_s=request_timeout,
        max_body_bytes=max_body_bytes,
        metrics_prefix=metrics_prefix.value,
        drain_s=drain_seconds,
        log_level=log_level.value,
    )
    config = {
        "tensor_parallel_size": tensor_parallel_size,
        "enable_expert_parallel": enable_expert_parallel,
        "rank_timeout_s": rank_timeout,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "max_num_pages": max_num_pages,
        "enable_prefix_caching": not no_prefix_caching,
        "engram_tables": engram_tables.value,
        "exactness": exactness.value,
        **_speculation(speculative_config, draft),
    }
    _set_up_log(settings)
    options: dict[str, Any] = {"model": model, "draft": draft.value, "max_waiting": settings.max_waiting, **config}
    require_folder(model)
    # A large model loads for minutes, after which nobody wants to learn that the port is taken.
    import_module("dspark.serve.run").open_socket(host, port).close()
    if replicas == 1:
        _run(AsyncEngine(**options), settings)
    else:
        _run_fleet(replicas, options, settings)


def _require_packages(extra: str, names: tuple[str, ...]) -> None:
    """Say which extra to install, before anything is loaded."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        listed = ", ".join(missing)
        raise DSparkError(f"dspark serve needs {listed}: run pip install 'dspark[{extra}]' in this environment")


def _keys_in(file: Path | None) -> list[str]:
    if file is None:
        return []
    keys = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if not keys:
        raise DSparkError(f"{file} holds no API key: write one a line, or leave out --api-key-file")
    return keys


def _speculation(text: str | None, draft: DraftChoice) -> dict[str, SpeculativeConfig]:
    """The config's field where it was given; without it, --draft decides."""
    if text is None:
        return {}
    if draft is DraftChoice.OFF:
        raise DSparkError("--speculative-config has no meaning with --draft off: leave one of them out")
    return {"speculative_config": read_speculative_json(text, adaptive=default_speculation())}


def _set_up_log(settings: ServerSettings) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _run(engine: Any, settings: ServerSettings) -> None:
    """Serve an engine of this process, or a fleet, until a signal ends it."""

    def show(address: str) -> None:
        out.print(f"{settings.model_name} is served at {address}")
        status = engine.status().loop
        out.print(f"speculation: {status.speculation}")
        if status.memory is not None:
            out.print(f"memory: {status.memory.sentence()}")
        out.file.flush()

    for sentence in engine.assembly.admission.notes:
        note(f"note: {sentence}")
    import_module("dspark.serve.run").serve(engine, settings, show)


def _run_fleet(count: int, options: dict[str, Any], settings: ServerSettings) -> None:
    """Several engines as Ray Serve replicas; this process only answers clients."""
    _require_packages("ray", ("ray",))
    known = outline(**{name: value for name, value in options.items() if name != "max_waiting"})
    if options["model"] is not None:
        options = {**options, "model": options["model"].resolve()}  # replicas start in folders of their own
    ray_serve = import_module("dspark.serve.replicas.ray_serve")
    gpus = known.config.tensor_parallel_size if known.placement.device.type == "cuda" else 0
    capacity = known.config.max_num_seqs + settings.max_waiting
    try:
        replicas = ray_serve.start_replicas(count, options, gpus_each=gpus, max_requests=capacity)
        fleet = import_module("dspark.serve.replicas.fleet").Fleet(known, replicas, settings.max_waiting)
        _run(fleet, settings)
    finally:
        ray_serve.stop_ray()
