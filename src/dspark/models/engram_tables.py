"""Constants of the Engram hash: multipliers, primes and offsets, all derived from the configuration."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark.config.errors import ConfigError
from dspark.layers.plans import EngramPlan

_SEED_STEP = 10007
_INT64_MAX = 2**63 - 1


def engram_plans(text: Mapping[str, Any]) -> dict[int, EngramPlan]:
    """Engram plans by layer index, empty where the model has none.

    Primes start anew just above `engram_vocab_size - 1` for each layer and n-gram size, and none is used twice.
    """
    if not text.get("engram_layer_ids"):
        return {}
    _require_room_for_primes(text)
    plans = {}
    for layer, num_rows, primes in zip(
        text["engram_layer_ids"], text["engram_num_embeddings"], _all_primes(text), strict=True
    ):
        total = sum(sum(heads) for heads in primes)
        if total != num_rows:
            raise ConfigError(
                f"engram_num_embeddings says {num_rows} rows for layer {layer}, the primes above "
                f"engram_vocab_size {text['engram_vocab_size']} add up to {total}: config.json is inconsistent"
            )
        plans[layer] = EngramPlan(
            num_rows=num_rows,
            head_dim=text["engram_head_dim"],
            num_heads=text["engram_n_heads"],
            max_ngram=text["engram_max_ngram_size"],
            multipliers=_multipliers(layer, text["engram_compressed_vocab_size"], text["engram_max_ngram_size"]),
            primes=primes,
            offsets=_offsets(primes),
        )
    return plans


def engram_row_counts(text: Mapping[str, Any]) -> list[int]:
    """Table rows of each Engram layer: the sum of its primes. What `engram_num_embeddings` must say."""
    return [sum(sum(heads) for heads in primes) for primes in _all_primes(text)]


def _require_room_for_primes(text: Mapping[str, Any]) -> None:
    """Refuse sizes whose primes cannot fit in the tables, before a search for all of them that may never end."""
    num_primes = text["engram_n_heads"] * (text["engram_max_ngram_size"] - 1)
    least = num_primes * text["engram_vocab_size"]
    for layer, num_rows in zip(text["engram_layer_ids"], text["engram_num_embeddings"], strict=True):
        if num_rows < least:
            raise ConfigError(
                f"engram_num_embeddings says {num_rows} rows for layer {layer}, but {num_primes} primes from "
                f"engram_vocab_size {text['engram_vocab_size']} up need at least {least}: config.json is inconsistent"
            )


def _all_primes(text: Mapping[str, Any]) -> list[tuple[tuple[int, ...], ...]]:
    """Primes [layer][n-gram size][head]."""
    used: set[int] = set()
    return [
        tuple(
            _next_primes(text["engram_vocab_size"] - 1, text["engram_n_heads"], used)
            for _ in range(text["engram_max_ngram_size"] - 1)
        )
        for _ in text["engram_layer_ids"]
    ]


def _multipliers(layer: int, compressed_vocab_size: int, count: int) -> tuple[int, ...]:
    """Odd 64-bit multipliers, small enough that a product with any compressed id stays positive."""
    bound = _INT64_MAX // compressed_vocab_size // 2
    drawn = np.random.default_rng(_SEED_STEP * layer).integers(low=0, high=bound, size=count, dtype=np.int64)
    return tuple(int(value) * 2 + 1 for value in drawn)


def _offsets(primes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """First table row of every head, cumulative and n-gram-major."""
    offsets, total = [], 0
    for heads in primes:
        row = []
        for prime in heads:
            row.append(total)
            total += prime
        offsets.append(tuple(row))
    return tuple(offsets)


def _next_primes(above: int, count: int, used: set[int]) -> tuple[int, ...]:
    """The next `count` primes greater than `above` that are not in `used`; they are added to it."""
    found: list[int] = []
    candidate = above + 1
    while len(found) < count:
        if candidate not in used and _is_prime(candidate):
            found.append(candidate)
            used.add(candidate)
        candidate += 1
    return tuple(found)


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    if value % 2 == 0:
        return False
    divisors = np.arange(3, int(value**0.5) + 1, 2)
    return not bool((value % divisors == 0).any())
