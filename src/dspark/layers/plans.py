"""Frozen descriptions of a model: every difference between model families is a value here, never a branch in a forward.

Storage names say how a tensor lies on disk; `activation_group` says how its input is fake-quantised.
"""

from dataclasses import dataclass
from enum import StrEnum

from dspark.ops.rope import YarnPlan
from dspark.parallel.shard import WHOLE, Shard


class Storage(StrEnum):
    """How a weight is stored on disk."""

    BF16 = "bf16"
    F32 = "f32"
    I64 = "i64"
    FP8_BLOCK = "fp8_block"  # e4m3, one ue8m0 scale a square block
    FP4_GROUP = "fp4_group"  # two e2m1 a byte, one ue8m0 scale per 32 columns
    FP8_ROW = "fp8_row"  # e4m3, one ue8m0 scale per 32 columns of a row


@dataclass(frozen=True)
class QuantPlan:
    """Storage of the weights that the checkpoint quantises, and the quantisation of their inputs.

    `block` is the side of an fp8 block and the width of an activation group; 0 where nothing is quantised.
    """

    dense: Storage
    experts: Storage
    engram: Storage
    block: int


@dataclass(frozen=True)
class CacheQuantPlan:
    """Fake quantisation of a cached row by `kind`: fp8, fp4 or fp4_e4m3, one scale for `group` values.

    `skip_rope` leaves the rotated tail as it is.
    """

    kind: str
    group: int
    skip_rope: bool = False


@dataclass(frozen=True)
class RopePlan:
    """Rotary embedding of the last `dim` elements."""

    dim: int
    base: float
    yarn: YarnPlan | None


@dataclass(frozen=True)
class CandidatePlan:
    """Two-level selection: `publishes` makes the block mask, others restrict their picks to it."""

    source_layer: int
    publishes: bool
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class CompressorPlan:
    """A pooling of token rows into compressed rows: `ratio` tokens a row; `overlap` pools the previous group too."""

    width: int
    ratio: int
    overlap: bool
    position_bias: bool

    @property
    def reach(self) -> int:
        """Token rows that one compressed row pools."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def projected_width(self) -> int:
        """Channels of the value and of the gate projection; overlapping groups have two halves."""
        return self.width * (2 if self.overlap else 1)

    @property
    def has_gate(self) -> bool:
        """A ratio of one has nothing to pool."""
        return self.ratio > 1


@dataclass(frozen=True)
class IndexerPlan:
    """Selection of compressed rows by a small attention of its own.

    Keys come from the latent of the layer's compressor (`key_compressor` None) or from a compressor of the
    indexer's own; `owns_keys` is false where the keys of `key_layer` are scored.
    """

    num_heads: int
    head_dim: int
    topk: int
    key_layer: int
    owns_keys: bool
    key_compressor: CompressorPlan | None
    hadamard: bool
    cache_quant: CacheQuantPlan
    candidates: CandidatePlan | None


@dataclass(frozen=True)
class CompressionPlan:
    """What a layer sees beyond its window.

    `compressor` is None where the rows of `source_layer` are shared; `indexer` is None where picks are shared
    (`pick_layer` says whose) or where every visible row is attended (`pick_layer` None).
    """

    ratio: int
    source_layer: int
    compressor: CompressorPlan | None
    cache_quant: CacheQuantPlan
    indexer: IndexerPlan | None
    pick_layer: int | None


@dataclass(frozen=True)
class AttentionPlan:
    """Latent attention with one key head shared by all query heads."""

    hidden_size: int
    num_heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    norm_eps: float
    normalise_query_heads: bool
    rope: RopePlan
    window_quant: CacheQuantPlan
    compression: CompressionPlan | None


@dataclass(frozen=True)
class MoePlan:
    """Routed experts and the shared one; `hash_vocab_size` > 0 where experts come from a token table.

    `held` are the routed experts whose weights are here; None where all are.
    """

    hidden_size: int
    inner_size: int
    shared_size: int
    num_experts: int
    topk: int
    limit: float
    scaling: float
    normalise: bool
    sum_eps: float
    hash_vocab_size: int
    held: range | None = None

    @property
    def held_experts(self) -> range:
        """Numbers of the routed experts whose weights are here."""
        return range(self.num_experts) if self.held is None else self.held


@dataclass(frozen=True)
class HyperPlan:
    """Residual streams; `shifted` collapses a half with the pre-weights that the half before it computed."""

    num_streams: int
    iterations: int
    eps: float
    norm_eps: float
    shifted: bool


@dataclass(frozen=True)
class EngramPlan:
    """Hashed n-gram memory of one layer. primes and offsets are [max_ngram - 1][heads].

    `parts` ranks divide the outputs of the projection among them.
    """

    num_rows: int
    head_dim: int
    num_heads: int
    max_ngram: int
    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    parts: int = 1


@dataclass(frozen=True)
class LayerPlan:
    """One transformer block; `name` is its prefix on disk and the key of its state."""

    name: str
    index: int
    hidden_size: int
    norm_eps: float
    attention: AttentionPlan
    moe: MoePlan
    hyper: HyperPlan
    engram: EngramPlan | None


@dataclass(frozen=True)
class DraftPlan:
    """The DSpark draft: stages, Markov head, confidence head."""

    stages: tuple[LayerPlan, ...]
    block_size: int
    noise_token_id: int
    markov_rank: int
    target_layer_ids: tuple[int, ...]
    captures_output: bool
    markov_embed: str
    markov_head: str


@dataclass(frozen=True)
class NgramPlan:
    """What Engram needs of a request: lookback tokens, and the compressed id that stands for missing history."""

    max_ngram: int
    pad_token_id: int
    compressed_vocab_size: int


@dataclass(frozen=True)
class ModelPlan:
    """A whole model, or what one rank holds of it.

    `head_mix` is true where the last collapse has a mix of its own. `shard` says which rank's part this is; heads,
    groups and widths of the layers are then those of the rank, and only the vocabulary is counted whole.
    """

    family: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    quant: QuantPlan
    layers: tuple[LayerPlan, ...]
    hyper: HyperPlan
    head_mix: bool
    draft: DraftPlan | None
    ngrams: NgramPlan | None
    skipped_prefixes: tuple[str, ...] = ()
    skipped_suffixes: tuple[str, ...] = ()
    shard: Shard = WHOLE

    @property
    def num_head_rows(self) -> int:
        """Tokens whose logits are computed here."""
        return len(self.shard.part(self.vocab_size))

    @property
    def max_ngram(self) -> int:
        """Tokens of the longest n-gram that Engram reads; 0 without it."""
        return self.ngrams.max_ngram if self.ngrams else 0

    @property
    def window(self) -> int:
        """Tokens that a query sees uncompressed, the current one included."""
        return self.layers[0].attention.window
