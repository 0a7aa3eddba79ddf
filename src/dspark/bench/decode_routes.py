"""How many experts the rows of a pass really reach: random weights route evenly, rows of one request not quite."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dspark.layers.moe import Router
from dspark.models.build import Model
from dspark.ops.route import Route


class RouteCounter:
    """Distinct experts a layer of target and draft passes, by number of rows; for passes that run eagerly."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._counts: dict[tuple[str, int], list[int]] = defaultdict(list)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count all routes inside."""
        networks: list[tuple[str, nn.Module]] = [("target", self._model.target)]
        if self._model.draft is not None:
            networks.append(("draft", self._model.draft))
        handles = [
            module.register_forward_hook(self._hook(kind))
            for kind, network in networks
            for module in network.modules()
            if isinstance(module, Router)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def mean(self, kind: str, num_rows: int) -> float | None:
        """Mean over layers and passes of so many rows; None where there was none."""
        counts = self._counts.get((kind, num_rows))
        return sum(counts) / len(counts) if counts else None

    def _hook(self, kind: str) -> Any:
        def count(module: nn.Module, args: Any, route: Route) -> None:
            found = route.expert_ids
            self._counts[kind, found.shape[0]].append(int(found.unique().numel()))

        return count
