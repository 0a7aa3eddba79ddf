"""Config: the settings of one engine, each field checked by itself when it is made.

Rules that compare fields, or a field with the model, are in `dspark.config.admission` and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dspark.config.admission import Admission, admit
from dspark.config.checks import require_bool, require_choice, require_int, require_number
from dspark.config.compilation import CompilationConfig
from dspark.config.errors import ConfigError
from dspark.config.facts import EngineFacts, HardwareFacts, ModelFacts
from dspark.config.notes import DEFAULT_GPU_MEMORY_UTILIZATION
from dspark.config.speculative import SpeculativeConfig, as_path

KV_CACHE_DTYPES: tuple[str, ...] = ("bf16", "fp32", "fp8", "fp4")
INDEX_CACHE_DTYPES: tuple[str, ...] = ("fp8", "fp4", "bf16")
DEVICES: tuple[str, ...] = ("auto", "cpu", "cuda")
DTYPES: tuple[str, ...] = ("auto", "bf16", "fp32")
ENGRAM_TABLES: tuple[str, ...] = ("device", "pinned", "mapped")
EXACTNESS: tuple[str, ...] = ("exact", "fast")

# Ranks look for each other several times in the first; what waits for them counts milliseconds in 32 bits.
MIN_RANK_TIMEOUT_S, MAX_RANK_TIMEOUT_S = 0.1, 1e6


@dataclass(frozen=True)
class Config:
    """Everything that shapes an engine.

    Args:
        model: folder of the checkpoint; None is the embedded model.
        tensor_parallel_size: ranks that share every layer.
        enable_expert_parallel: give whole experts to ranks instead of a slice of each.
        rank_timeout_s: seconds in which a rank must give a sign of life, and end a pass like one that has ended before.
        rank_setup_timeout_s: the same for loading, and for passes that compile kernels or capture graphs.
        kv_cache_dtype: storage of window and compressed KV rows.
        index_cache_dtype: storage of index keys; their values fit fp4 exactly, so this trades speed for bytes only.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows of one pass at most; a prompt longer than this is prefilled in chunks.
        max_model_len: tokens of a request, prompt and output together; None takes the model's own limit.
        max_num_pages: pages of growing storage; None takes as many as max_num_seqs requests can need, or as fit.
        enable_prefix_caching: reuse pages and images of earlier requests.
        prefix_cache_interval: tokens between two images of a long prompt; rounded up to whole pages, None takes four.
        prefix_cache_bytes: memory for images; the oldest give way.
        enforce_eager: never capture graphs.
        device: "auto" takes an accelerator when there is one and the engine has kernels for it.
        dtype: activations; "auto" is fp32 on the CPU and bf16 elsewhere.
        engram_tables: where they lie: "device" is beside the weights, "pinned" is memory of the host that kernels read,
            "mapped" is their file, of which the host reads rows when they are asked for.
        exactness: "fast" may use products of the vendor's library, and then a request's tokens may depend on others.
        gpu_memory_utilization: share of the device memory that weights, state, graphs and workspaces may take.
        compilation_config, speculative_config: see there; no speculative_config means plain decoding.
    """

    model: str | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    rank_timeout_s: float = 10.0
    rank_setup_timeout_s: float = 600.0
    kv_cache_dtype: Literal["bf16", "fp32", "fp8", "fp4"] = "bf16"
    index_cache_dtype: Literal["fp8", "fp4", "bf16"] = "fp8"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_num_pages: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_interval: int | None = None
    prefix_cache_bytes: int = 2**30
    enforce_eager: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    engram_tables: Literal["device", "pinned", "mapped"] = "device"
    exactness: Literal["exact", "fast"] = "exact"
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            object.__setattr__(self, "model", as_path("model", self.model))
        for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "prefix_cache_bytes"):
            require_int(name, getattr(self, name), low=1)
        for name in ("max_model_len", "max_num_pages", "prefix_cache_interval"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), low=1)
        for name in ("enable_expert_parallel", "enable_prefix_caching", "enforce_eager"):
            require_bool(name, getattr(self, name))
        require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        require_choice("index_cache_dtype", self.index_cache_dtype, INDEX_CACHE_DTYPES)
        require_choice("device", self.device, DEVICES)
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("engram_tables", self.engram_tables, ENGRAM_TABLES)
        require_choice("exactness", self.exactness, EXACTNESS)
        for name in ("rank_timeout_s", "rank_setup_timeout_s"):
            require_number(name, getattr(self, name), low=MIN_RANK_TIMEOUT_S, high=MAX_RANK_TIMEOUT_S)
        require_number("gpu_memory_utilization", self.gpu_memory_utilization, above=0.0, high=1.0)
        _require_type("compilation_config", self.compilation_config, CompilationConfig)
        if self.speculative_config is not None:
            _require_type("speculative_config", self.speculative_config, SpeculativeConfig)

    def draft_width(self, facts: ModelFacts) -> int:
        """Draft tokens per round, G: as asked for, else the trained block size; 0 without speculation."""
        if self.speculative_config is None:
            return 0
        return self.speculative_config.num_speculative_tokens or facts.draft_block_size

    def context_len(self, facts: ModelFacts) -> int:
        """Tokens that one request may hold, prompt and output together."""
        return self.max_model_len or facts.max_position_embeddings

    def validated(
        self,
        facts: ModelFacts,
        *,
        draft: ModelFacts | None = None,
        hardware: HardwareFacts | None = None,
        engine: EngineFacts | None = None,
    ) -> Admission:
        """Check every rule of admission and return what a user should be told.

        Raises:
            ConfigError: one or more refusals; the message lists them all.
        """
        admission = admit(self, facts, draft=draft, hardware=hardware, engine=engine)
        if admission.refusals:
            raise ConfigError("\n".join(admission.refusals))
        return admission

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The public settings in order; a frozen surface."""
        return tuple(item.name for item in fields(cls))


def _require_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, not {value!r}")
