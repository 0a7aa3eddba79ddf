"""What exactness costs on this machine: the engine's products, whose rows keep their bits, against the library's own.

Both run the same model on the same rows, one after the other in one process. Beside the times stands what the
library's products would have cost in exactness: rows whose bits change with the number of rows beside them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dspark.engine.machine import describe_machine
from dspark.engine.runner import SpanTokens, TargetRunner
from dspark.models.build import load_model
from dspark.ops.library import with_library_products
from dspark.ops.opset import TORCH_OPS, OpSet
from dspark.state.model_state import ModelState

ROW_COUNTS = (1, 2, 4, 6, 8, 16, 64, 256)
LIBRARY_OPS = with_library_products(TORCH_OPS)


@dataclass(frozen=True)
class RowLawRow:
    """One row count: median times of a target pass, and rows whose logits differ in bits from the row passed alone."""

    num_rows: int
    exact_ms: float
    library_ms: float
    exact_changed: int
    library_changed: int

    @property
    def ratio(self) -> float:
        """Time of the exact pass over the library's."""
        return self.exact_ms / self.library_ms


@dataclass(frozen=True)
class RowLawReport:
    """Figures for all row counts on one machine."""

    model: str
    machine: dict[str, Any]
    repeats: int
    rows: tuple[RowLawRow, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "schema": "dspark.bench.rows/1",
            "model": self.model,
            "machine": self.machine,
            "repeats": self.repeats,
            "rows": [{**vars(row), "ratio": row.ratio} for row in self.rows],
        }


class _Passes:
    """Target passes over the first tokens of one text, with one set of ops."""

    def __init__(self, folder: Path, ops: OpSet, token_ids: Sequence[int]) -> None:
        model = load_model(folder, ops, with_draft=False)
        page_tokens = ModelState.page_tokens_of(model.plan)
        self._state = ModelState(model.plan, 1, -(-len(token_ids) // page_tokens), len(token_ids))
        self._runner = TargetRunner(model, self._state)
        self._request = self._state.open()
        self._token_ids = list(token_ids)

    def logits(self, num_rows: int) -> Tensor:
        """[num_rows, V] of one pass over the first rows; nothing stays committed."""
        span = SpanTokens(self._request, [], self._token_ids[:num_rows], num_rows)
        logits = self._runner.forward([span]).logits
        self._request.tentative = 0
        return logits

    def one_by_one(self) -> Tensor:
        """[all rows, V], each row passed alone after its predecessors."""
        parts = []
        for place, token in enumerate(self._token_ids):
            parts.append(self._runner.forward([SpanTokens(self._request, self._token_ids[:place], [token], 1)]).logits)
            self._state.commit(self._request, 1)
        self._state.close(self._request)
        self._request = self._state.open()
        return torch.cat(parts)


def run_row_law_bench(
    folder: Path, model: str, token_ids: Sequence[int], repeats: int, on_rows: Callable[[], None] = lambda: None
) -> RowLawReport:
    """Measure both sets of products at every row count that the text is long enough for.

    Args:
        folder, model: checkpoint and its name for the report.
        token_ids: a text; its first rows are passed.
        repeats: timed passes of each kind, taking turns; one pass of each comes before.
        on_rows: called after each row count.
    """
    counts = [count for count in ROW_COUNTS if count <= len(token_ids)]
    text = token_ids[: max(counts)]
    exact, library = _Passes(folder, TORCH_OPS, text), _Passes(folder, LIBRARY_OPS, text)
    exact_alone, library_alone = exact.one_by_one(), library.one_by_one()
    rows = []
    for count in counts:
        changed = [
            _changed(side.logits(count), alone) for side, alone in ((exact, exact_alone), (library, library_alone))
        ]
        times = [(_timed_ms(exact, count), _timed_ms(library, count)) for _ in range(repeats)]
        exact_ms, library_ms = (median(column) for column in zip(*times, strict=True))
        rows.append(RowLawRow(count, exact_ms, library_ms, *changed))
        on_rows()
    return RowLawReport(model, describe_machine(torch.device("cpu")), repeats, tuple(rows))


def _changed(logits: Tensor, alone: Tensor) -> int:
    return int((logits != alone[: logits.shape[0]]).any(dim=1).sum())


def _timed_ms(passes: _Passes, num_rows: int) -> float:
    began = time.perf_counter()
    passes.logits(num_rows)
    return (time.perf_counter() - began) * 1e3
