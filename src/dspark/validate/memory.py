"""Memory of a model before it is loaded: weights by class and dtype, state per request, pages per token."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from dspark.checkpoint.formats import FP4_GROUP
from dspark.checkpoint.plan import TensorPlan
from dspark.layers.plans import ModelPlan
from dspark.models.inventory import DRAFT_PREFIX
from dspark.state.geometry import AppendPlan, RingPlan, rewind_rows, ring_rows, rows_ahead, state_geometry

_FLOAT_BYTES = 4
# Bytes of one value; fp8 and fp4 rows also hold one scale byte per group of 32.
_VALUE_BYTES = {"fp32": Fraction(4), "bf16": Fraction(2), "fp8": Fraction(1), "fp4": Fraction(1, 2)}
_SCALED_DTYPES = ("fp8", "fp4")


@dataclass(frozen=True)
class WeightBytes:
    """Stored bytes of one class of tensors in one dtype."""

    memory_class: str
    dtype: str
    num_tensors: int
    num_bytes: int

    @property
    def is_draft(self) -> bool:
        return self.memory_class.startswith(DRAFT_PREFIX)


@dataclass(frozen=True)
class RingBytes:
    """Rings of one kind, of one request: `num_rings` of them, of `num_rows` rows; `slack_rows` are for drafts."""

    name: str
    num_rings: int
    num_rows: int
    slack_rows: int
    num_bytes: int


@dataclass(frozen=True)
class GrowingBytes:
    """Rows that grow with a request, of one kind: one row per `ratio` tokens in each of `num_stores` stores."""

    name: str
    num_stores: int
    ratio: int
    row_bytes: int
    bytes_per_token: float


@dataclass(frozen=True)
class StateBytes:
    """State of one request, and of a page of `page_tokens` tokens."""

    rings: tuple[RingBytes, ...]
    growing: tuple[GrowingBytes, ...]
    page_tokens: int
    page_bytes: int

    @property
    def request_bytes(self) -> int:
        """What a request holds whatever its length."""
        return sum(ring.num_bytes for ring in self.rings)

    @property
    def bytes_per_token(self) -> float:
        return sum(item.bytes_per_token for item in self.growing)

    def paged_bytes(self, num_tokens: int) -> int:
        """Pages of a request of this length."""
        return -(-num_tokens // self.page_tokens) * self.page_bytes


def weight_table(tensors: Iterable[TensorPlan]) -> tuple[WeightBytes, ...]:
    """Stored bytes by class and dtype: the largest class first, the draft after the target."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for tensor in tensors:
        entry = counts[str(tensor.memory_class), tensor.dtype]
        entry[0] += 1
        entry[1] += tensor.num_bytes
    rows = [WeightBytes(*key, *entry) for key, entry in counts.items()]
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[row.memory_class] += row.num_bytes
    return tuple(sorted(rows, key=lambda row: (row.is_draft, -totals[row.memory_class], -row.num_bytes)))


def float32_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Bytes of the weights when every coded value is unpacked to fp32, as the CPU engine holds them."""
    tensors = list(tensors)
    scales = {tensor.scale for tensor in tensors}
    return sum(_unpacked_bytes(tensor) for tensor in tensors if tensor.name not in scales)


def _unpacked_bytes(tensor: TensorPlan) -> int:
    if tensor.dtype == "I64":
        return tensor.num_bytes
    return _FLOAT_BYTES * math.prod(tensor.shape) * (2 if tensor.encoding == "fp4" else 1)


def state_bytes(
    plan: ModelPlan, num_draft_tokens: int, kv_cache_dtype: str, index_cache_dtype: str, *, reuses_prefixes: bool
) -> StateBytes:
    """State of one request.

    Args:
        plan: the model; draft windows count when `num_draft_tokens` > 0.
        num_draft_tokens: draft width G; rings hold G rows beyond their reach, so that no tentative row overwrites
            one that is still needed, and those of a round that runs ahead.
        reuses_prefixes: rings also hold the rows that images of earlier positions need.
        kv_cache_dtype: of window and compressed rows; the open groups' inputs are always fp32.
        index_cache_dtype: of index keys.
    """
    geometry = state_geometry(plan)
    drafts = {stage.name for stage in plan.draft.stages} if plan.draft else set()
    windows = [ring for ring in geometry.windows if ring.key not in drafts]
    draft_windows = [ring for ring in geometry.windows if ring.key in drafts and num_draft_tokens]
    rewind = rewind_rows(geometry, reuses_prefixes=reuses_prefixes)
    growing = _growing(geometry.appends, kv_cache_dtype, index_cache_dtype)
    per_token = sum((_per_token(item) for item in growing), Fraction(0))
    return StateBytes(
        rings=(
            *_rings("windows", windows, num_draft_tokens, rewind, kv_cache_dtype),
            *_rings("draft windows", draft_windows, num_draft_tokens, rewind, kv_cache_dtype),
            *_rings("open groups", geometry.tails, num_draft_tokens, rewind, "fp32"),
        ),
        growing=growing,
        page_tokens=geometry.page_tokens,
        page_bytes=int(geometry.page_tokens * per_token),
    )


def row_bytes(width: int, dtype: str) -> int:
    """Bytes of one cached row of `width` values, with its scales where the dtype has some."""
    scales = -(-width // FP4_GROUP) if dtype in _SCALED_DTYPES else 0
    return int(-(-width * _VALUE_BYTES[dtype] // 1)) + scales


def _rings(name: str, rings: Iterable[RingPlan], num_draft_tokens: int, rewind: int, dtype: str) -> list[RingBytes]:
    """One entry for each ring length; equal rings of many layers are counted together."""
    by_rows: dict[int, list[RingPlan]] = defaultdict(list)
    query_len = 1 + num_draft_tokens
    for ring in rings:
        by_rows[ring_rows(ring, query_len + rows_ahead(query_len), rewind)].append(ring)
    return [
        RingBytes(
            name=name,
            num_rings=len(same),
            num_rows=num_rows,
            slack_rows=num_draft_tokens + rows_ahead(query_len) - rows_ahead(1),
            num_bytes=sum(num_rows * row_bytes(ring.width, dtype) for ring in same),
        )
        for num_rows, same in sorted(by_rows.items())
    ]


def _growing(appends: Iterable[AppendPlan], kv_dtype: str, index_dtype: str) -> tuple[GrowingBytes, ...]:
    stores: dict[tuple[str, int, int], int] = defaultdict(int)
    for store in appends:
        size = row_bytes(store.width, index_dtype if store.holds_index_keys else kv_dtype)
        stores["index keys" if store.holds_index_keys else "compressed rows", store.ratio, size] += 1
    return tuple(
        GrowingBytes(name, count, ratio, size, count * size / ratio)
        for (name, ratio, size), count in sorted(stores.items())
    )


def _per_token(item: GrowingBytes) -> Fraction:
    """Exact bytes per token: a page of whole groups then has a whole number of bytes."""
    return Fraction(item.num_stores * item.row_bytes, item.ratio)
