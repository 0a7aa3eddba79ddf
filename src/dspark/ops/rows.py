"""Writing of rows into a store."""

from torch import Tensor


def write_rows(store: Tensor, places: Tensor, rows: Tensor) -> None:
    """store[places[t]] = rows[t], in the dtype of the store; a place of -1 is nowhere, and no other occurs twice.

    Args:
        store: [N, K], changed. places: [T] int64. rows: [T, K].
    """
    kept = places >= 0
    store[places[kept]] = rows[kept].to(store.dtype)
