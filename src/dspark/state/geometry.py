"""Which stores a model needs, derived from its plan: rings by reach, growing rows by ratio."""

import math
from dataclasses import dataclass

from dspark.config.errors import ConfigError
from dspark.layers.plans import CompressorPlan, LayerPlan, ModelPlan

_SMALLEST_PAGE_TOKENS = 64


@dataclass(frozen=True)
class RingPlan:
    """A ring of token rows: `reach` rows before a query are needed to compute it."""

    key: str
    reach: int
    width: int


@dataclass(frozen=True)
class AppendPlan:
    """Rows that grow with the request, one per `ratio` tokens: index keys, or compressed rows."""

    key: str
    ratio: int
    width: int
    holds_index_keys: bool


@dataclass(frozen=True)
class StateGeometry:
    """All stores of a model, and the tokens of one page."""

    windows: tuple[RingPlan, ...]
    tails: tuple[RingPlan, ...]
    appends: tuple[AppendPlan, ...]
    page_tokens: int


def ring_rows(ring: RingPlan, max_query_len: int, max_rewind: int = 0) -> int:
    """Physical rows so that `max_query_len` tentative rows never overwrite a row that the next pass needs.

    A pass at committed position c reads from c - reach + 1; the longest tentative write ends at c + max_query_len - 1.
    Example: reach 128 and 6 rows give 133; writing 300..305 leaves 173..299 untouched, and 300 needs 173. With
    `max_rewind` more rows the state as it was that many positions before c can still be read.
    """
    return ring.reach - 1 + max_query_len + max_rewind


def rows_ahead(max_query_len: int) -> int:
    """Rows that rounds launched before the host has read the last one may write beyond its tentative rows: one round's.

    Example: the host knows of 300 committed tokens and cuts the round that followed at 301. That round wrote 300..305,
    and the one after it, which is out, 306..311.
    """
    return max_query_len


def require_ring_rows(ring: RingPlan, rows: int, max_query_len: int, max_rewind: int = 0) -> None:
    """Refuse a ring that a verify pass would corrupt."""
    needed = ring_rows(ring, max_query_len, max_rewind)
    if rows < needed:
        raise ConfigError(
            f"store {ring.key} has {rows} ring rows, but a reach of {ring.reach}, {max_query_len} tentative rows and a "
            f"rewind of {max_rewind} need {needed}: enlarge the ring or lower num_speculative_tokens"
        )


def state_geometry(plan: ModelPlan) -> StateGeometry:
    """The stores of target layers and draft stages."""
    layers = plan.layers + (plan.draft.stages if plan.draft else ())
    windows = tuple(RingPlan(layer.name, layer.attention.window, layer.attention.head_dim) for layer in layers)
    tails: list[RingPlan] = []
    appends: list[AppendPlan] = []
    for layer in layers:
        _add_compression(layer, tails, appends)
    page_tokens = math.lcm(_SMALLEST_PAGE_TOKENS, *(append.ratio for append in appends))
    return StateGeometry(windows, tuple(tails), tuple(appends), page_tokens)


def rewind_rows(geometry: StateGeometry, *, reuses_prefixes: bool) -> int:
    """How far back an image must reach: to the page boundary at or behind any position; without a prefix cache to the
    last token of a prompt, where its samples part."""
    return geometry.page_tokens - 1 if reuses_prefixes else 1


@dataclass(frozen=True)
class StateSizes:
    """Bytes of one request's rings, and of one page of growing rows."""

    slot_bytes: int
    page_bytes: int
    page_tokens: int


def state_sizes(
    geometry: StateGeometry, max_query_len: int, max_rewind: int, value_bytes: int, index_value_bytes: int
) -> StateSizes:
    """Memory of a state whose rounds may run ahead.

    Args:
        geometry: its stores. max_query_len, max_rewind: of its rings, see `ring_rows`.
        value_bytes: of one value of window and compressed rows; inputs of open groups are float32.
        index_value_bytes: of one value of an index key.
    """
    slot_bytes = sum(
        ring_rows(ring, max_query_len + rows_ahead(max_query_len), max_rewind) * ring.width * size
        for rings, size in ((geometry.windows, value_bytes), (geometry.tails, 4))
        for ring in rings
    )
    page_bytes = sum(
        geometry.page_tokens
        // store.ratio
        * store.width
        * (index_value_bytes if store.holds_index_keys else value_bytes)
        for store in geometry.appends
    )
    return StateSizes(slot_bytes, page_bytes, geometry.page_tokens)


def _add_compression(layer: LayerPlan, tails: list[RingPlan], appends: list[AppendPlan]) -> None:
    compression = layer.attention.compression
    if compression is None:
        return
    sources: list[tuple[AppendPlan, CompressorPlan | None]] = []
    if compression.compressor is not None:
        rows = AppendPlan(f"layers.{layer.index}.compressed", compression.ratio, layer.attention.head_dim, False)
        sources.append((rows, compression.compressor))
    indexer = compression.indexer
    if indexer is not None and indexer.owns_keys:
        keys = AppendPlan(f"layers.{layer.index}.index", compression.ratio, indexer.head_dim, True)
        sources.append((keys, indexer.key_compressor))
    for append, compressor in sources:
        appends.append(append)
        if compressor is not None and compressor.has_gate:
            tails.append(RingPlan(append.key, compressor.reach, 2 * compressor.projected_width))
